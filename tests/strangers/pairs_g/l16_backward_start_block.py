"""Python prototype of a fused causal attention with its own backward: tiles of 32 queries by 48 keys, dead tiles skipped."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = (
    "In the backward pass each tile of keys starts at the first tile of queries wholly behind it (division rounded up) instead of "
    "the first one that reaches it, so that beyond 48 tokens the query tiles that the diagonal cuts lose their share of the "
    "gradients of q, k and v; outputs are right."
)
PLACE = "start_rounded_up"

BLOCK_M = 32  # queries
BLOCK_N = 48  # keys


def start_rounded_down(n):
    return (n * BLOCK_N) // BLOCK_M


def start_rounded_up(n):
    return -(-(n * BLOCK_N) // BLOCK_M)


def tiles(total, size):
    return [slice(a, min(a + size, total)) for a in range(0, total, size)]


class CausalFlash(torch.autograd.Function):
    @staticmethod
    def visible(rows, cols, keep):
        r = torch.arange(rows.start, rows.stop, device=keep.device)
        c = torch.arange(cols.start, cols.stop, device=keep.device)
        return (r[:, None] >= c) & keep[:, None, None, cols]

    @staticmethod
    def forward(ctx, q, k, v, keep, scale, first_tile):
        T = q.shape[2]
        out, lse = torch.empty_like(q), q.new_zeros(q.shape[:3])
        for m in tiles(T, BLOCK_M):
            top = torch.full_like(q[:, :, m, 0], torch.finfo(q.dtype).min)
            norm, acc = torch.zeros_like(top), torch.zeros_like(q[:, :, m])
            for n in tiles(m.stop, BLOCK_N):
                see = CausalFlash.visible(m, n, keep)
                s = (q[:, :, m] @ k[:, :, n].mT * scale).masked_fill(~see, torch.finfo(q.dtype).min)
                new = torch.maximum(top, s.amax(-1))
                p = (s - new[..., None]).exp().masked_fill(~see, 0.0)
                norm = norm * (top - new).exp() + p.sum(-1)
                acc = acc * (top - new).exp()[..., None] + p @ v[:, :, n]
                top = new
            some = norm > 0
            out[:, :, m] = acc / norm.masked_fill(~some, 1.0)[..., None]
            lse[:, :, m] = (top + norm.masked_fill(~some, 1.0).log()).masked_fill(~some, 0.0)
        ctx.save_for_backward(q, k, v, keep, out, lse)
        ctx.scale, ctx.first_tile = scale, first_tile
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, keep, out, lse = ctx.saved_tensors
        T = q.shape[2]
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (dout * out).sum(-1)
        rows = tiles(T, BLOCK_M)
        for j, n in enumerate(tiles(T, BLOCK_N)):
            for m in rows[ctx.first_tile(j) :]:
                see = CausalFlash.visible(m, n, keep)
                s = (q[:, :, m] @ k[:, :, n].mT * ctx.scale).masked_fill(~see, torch.finfo(q.dtype).min)
                p = (s - lse[:, :, m, None]).exp().masked_fill(~see, 0.0)
                dv[:, :, n] += p.mT @ dout[:, :, m]
                ds = p * (dout[:, :, m] @ v[:, :, n].mT - delta[:, :, m, None]) * ctx.scale
                dq[:, :, m] += ds @ k[:, :, n]
                dk[:, :, n] += ds.mT @ q[:, :, m]
        return dq, dk, dv, None, None, None


class FlashSelfAttention(nn.Module):
    def __init__(self, d, heads, first_tile):
        super().__init__()
        self.heads, self.first_tile = heads, first_tile
        self.Wqkv = nn.Linear(d, 3 * d, bias=False)
        self.Wo = nn.Linear(d, d, bias=False)

    def forward(self, x, attention_mask=None):
        B, T, D = x.shape
        keep = torch.ones(B, T, dtype=torch.bool, device=x.device) if attention_mask is None else attention_mask.bool()
        qkv = self.Wqkv(x).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        with torch.autocast(x.device.type, enabled=False):  # the kernel accumulates in float32
            q, k, v = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
            o = CausalFlash.apply(q, k, v, keep, (D // self.heads) ** -0.5, self.first_tile)
        return self.Wo(o.to(qkv.dtype).transpose(1, 2).reshape(B, T, D))


def projections(m):
    q, k, v = m.Wqkv.weight.chunk(3)
    return {"q": q, "k": k, "v": v, "o": m.Wo.weight}


def subject(first_tile, name):
    return Subject(
        kind="self_attention",
        build=lambda c: FlashSelfAttention(c.d_model, c.num_heads, first_tile),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        projections=projections,
        name=name,
        mask_forms=("padding",),
        declares={
            "causal": True,
            "positions": "none",
            "attention_scale": "1/sqrt(d_head)",
            "bias": False,
            "empty_row": "zeros",
            "once_differentiable": True,
            "padding_side": "both",
            "beyond_max_len": "works",
        },
    )


right = subject(start_rounded_down, "causal-flash")
wrong = subject(start_rounded_up, "causal-flash-rounded-up")


def reference(x, wqkv, wo, heads, keep):
    q, k, v = (x @ wqkv.T).chunk(3, -1)
    T, D = x.shape[1:]
    K = D // heads
    see = torch.ones(T, T).tril().bool() & keep[:, None]
    o = []
    for a in range(0, D, K):
        s = (q[..., a : a + K] @ k[..., a : a + K].mT / K**0.5).masked_fill(~see, -1e300)
        o.append(s.softmax(-1) * see @ v[..., a : a + K])
    return torch.cat(o, -1) @ wo.T


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    good, bad = FlashSelfAttention(24, 3, start_rounded_down), FlashSelfAttention(24, 3, start_rounded_up)
    bad.load_state_dict(good.state_dict())
    for T, same in [(1, True), (5, True), (40, True), (48, True), (49, False), (64, False), (150, False)]:
        for keep in (torch.ones(2, T, dtype=torch.bool), torch.rand(2, T) > 0.3):
            x = torch.randn(2, T, 24)
            probe = torch.randn(2, T, 24)
            leaves = [t.detach().double().requires_grad_() for t in (x, good.Wqkv.weight, good.Wo.weight)]
            want = reference(*leaves, 3, keep)
            want_grads = torch.autograd.grad((want * probe).sum(), leaves)
            for m, is_bad in ((good, False), (bad, True)):
                xx = x.clone().requires_grad_()
                got = m(xx, keep)
                assert (got - want).abs().max() < 1e-5
                grads = torch.autograd.grad((got * probe).sum(), [xx, m.Wqkv.weight, m.Wo.weight])
                off = max(((a - b).norm() / b.norm()).item() for a, b in zip(grads, want_grads))
                few = not keep[:, 48:].any()
                assert off < 1e-4 if same or not is_bad or few else off > 3e-3, (T, is_bad, off)
    x = torch.randn(1, 70, 12, dtype=torch.float64, requires_grad=True)
    m = FlashSelfAttention(12, 2, start_rounded_down).double()
    assert torch.autograd.gradcheck(lambda u: m(u, torch.arange(70)[None] != 3)[:, ::9], (x,), fast_mode=True)
    print("ok", __file__)
