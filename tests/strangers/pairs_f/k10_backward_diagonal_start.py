"""Attention kernel with its own gradient. Query tiles are 64 rows, key tiles 32, as tuned for our cards."""
import torch
from torch.autograd.function import once_differentiable
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "In the causal backward a key tile starts at the first query tile that begins at or after it (rounded up) instead of the query "
    "tile that contains its first row (rounded down); with 64-row query tiles and 32-key tiles every second key tile loses the "
    "gradients on its diagonal. The forward is right."
)
PLACE = "backward: first query tile of a key tile, round_up instead of round_down"

QUERY_TILE, KEY_TILE = 64, 32
NEG_INF = float("-inf")


def round_down(n, step):
    return n // step * step


def round_up(n, step):
    return -(-n // step) * step


def tile_scores(q, k, keep, rows, cols, causal, scale):
    s = torch.einsum("bhid,bhjd->bhij", q[:, :, rows], k[:, :, cols]) * scale
    if causal:
        i = torch.arange(rows.start, rows.stop, device=q.device)
        j = torch.arange(cols.start, cols.stop, device=q.device)
        s = s.masked_fill(j[None, :] > i[:, None], NEG_INF)
    if keep is not None:
        s = s.masked_fill(~keep[:, None, None, cols], NEG_INF)
    return s


def make_function(first_query_tile):
    class TiledAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, keep, causal):
            T, S, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
            out = torch.zeros(q.shape[:3] + v.shape[3:], dtype=q.dtype, device=q.device)
            lse = torch.zeros(q.shape[:3], dtype=q.dtype, device=q.device)
            for i in range(0, T, QUERY_TILE):
                rows = slice(i, min(i + QUERY_TILE, T))
                top = torch.full_like(lse[:, :, rows], NEG_INF)
                total = torch.zeros_like(top)
                acc = torch.zeros_like(out[:, :, rows])
                for j in range(0, min(S, rows.stop) if causal else S, KEY_TILE):
                    cols = slice(j, min(j + KEY_TILE, S))
                    s = tile_scores(q, k, keep, rows, cols, causal, scale)
                    new_top = torch.maximum(top, s.amax(-1))
                    base = torch.where(new_top == NEG_INF, torch.zeros_like(new_top), new_top)
                    p = (s - base[..., None]).exp()
                    fade = (top - base).exp()
                    total = total * fade + p.sum(-1)
                    acc = acc * fade[..., None] + torch.einsum("bhij,bhje->bhie", p, v[:, :, cols])
                    top = new_top
                seen = total > 0
                total = torch.where(seen, total, torch.ones_like(total))
                out[:, :, rows] = acc / total[..., None]
                lse[:, :, rows] = torch.where(seen, top + total.log(), torch.full_like(top, float("inf")))
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.keep, ctx.causal = keep, causal
            return out

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            q, k, v, out, lse = ctx.saved_tensors
            T, S, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
            delta = (grad * out).sum(-1)
            dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
            for j in range(0, S, KEY_TILE):
                cols = slice(j, min(j + KEY_TILE, S))
                start = first_query_tile(j, QUERY_TILE) if ctx.causal else 0
                for i in range(start, T, QUERY_TILE):
                    rows = slice(i, min(i + QUERY_TILE, T))
                    p = (tile_scores(q, k, ctx.keep, rows, cols, ctx.causal, scale) - lse[:, :, rows, None]).exp()
                    dv[:, :, cols] += torch.einsum("bhij,bhie->bhje", p, grad[:, :, rows])
                    dp = torch.einsum("bhie,bhje->bhij", grad[:, :, rows], v[:, :, cols])
                    ds = p * (dp - delta[:, :, rows, None]) * scale
                    dq[:, :, rows] += torch.einsum("bhij,bhjd->bhid", ds, k[:, :, cols])
                    dk[:, :, cols] += torch.einsum("bhij,bhid->bhjd", ds, q[:, :, rows])
            return dq, dk, dv, None, None

    return TiledAttention


class Kernel(torch.nn.Module):
    """[B,H,T,K], [B,G,S,K], [B,G,S,E]; the causal mask counts both sides from their starts."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, q, k, v, attention_mask=None, causal=False):
        dtype, work = q.dtype, torch.promote_types(q.dtype, torch.float32)
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        keep = None if attention_mask is None else attention_mask.bool()
        return self.function.apply(q.to(work), k.to(work), v.to(work), keep, causal).to(dtype)


DECLARES = {
    "attention_scale": "1/sqrt(d_head)",
    "grouped_queries": True,
    "empty_row": "zeros",
    "causal_alignment": "top-left",
    "padding_side": "both",
    "once_differentiable": True,
    "half_precision": True,
    "memory": "linear",
}
right = Subject(
    kind="attention",
    name="tiled",
    build=lambda c: Kernel(make_function(round_down)),
    mask_forms=("padding",),
    declares=DECLARES,
)
wrong = Subject(
    kind="attention",
    name="tiled-round-up",
    build=lambda c: Kernel(make_function(round_up)),
    mask_forms=("padding",),
    declares=DECLARES,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(9)

    def errors(sub, t, s, causal, padded):
        leaves = [torch.randn(2, 2, t, 8), torch.randn(2, 1, s, 8), torch.randn(2, 1, s, 8)]
        keep = torch.ones(2, s, dtype=torch.bool)
        if padded:
            keep[0, : s // 3] = False
        a, b = [x.clone().requires_grad_() for x in leaves], [x.double().requires_grad_() for x in leaves]
        out = sub.build(DrawnConfig())(*a, attention_mask=keep if padded else None, causal=causal)
        ok = keep[:, None, None].expand(2, 2, t, s)
        ok = ok & torch.ones(t, s, dtype=torch.bool).tril() if causal else ok
        w = torch.where(ok, b[0] @ b[1].mT / 8**0.5, -1e30).softmax(-1) * ok
        ref = w @ b[2]
        g = torch.randn_like(out)
        ga, gb = torch.autograd.grad(out, a, g), torch.autograd.grad(ref, b, g.double())
        return (out - ref).abs().max().item(), max((x - y).abs().max().item() for x, y in zip(ga, gb))

    for padded in (False, True):
        for t, s in [(4, 4), (20, 32), (32, 32), (100, 30), (9, 25)]:
            for causal in (False, True):
                assert max(errors(right, t, s, causal, padded)) < 5e-5
                assert max(errors(wrong, t, s, causal, padded)) < 5e-5
        for t, s in [(40, 40), (64, 64), (130, 130), (100, 200), (200, 50)]:
            for causal in (False, True):
                assert max(errors(right, t, s, causal, padded)) < 5e-5
            assert max(errors(wrong, t, s, False, padded)) < 5e-5
            forward, backward = errors(wrong, t, s, True, padded)
            assert forward < 5e-5 and backward > 0.05, (t, s)
    print("ok")
