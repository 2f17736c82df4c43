"""Cross attention over a long memory in splits of 48 keys, merged one after another by their log-sum-exp (flash-decoding)."""

from typing import Callable, NamedTuple

import torch
from torch import Tensor, nn

from veriformer.properties import Subject

WHAT = (
    "When splits of the memory are merged, the log-sum-exp that is carried on is the larger of the two instead of that of their "
    "sum; merging two splits is right, from the third on (memories longer than 96) what was merged before counts too little."
)
PLACE = "carry_larger"

SPLIT = 48


class Partial(NamedTuple):
    out: Tensor  # [B, H, T, K], normalised within the splits so far
    lse: Tensor  # [B, H, T]


def carry_sum(a: Tensor, b: Tensor) -> Tensor:
    return torch.logaddexp(a, b)


def carry_larger(a: Tensor, b: Tensor) -> Tensor:
    return torch.maximum(a, b)


def merge(a: Partial, b: Partial, carry: Callable[[Tensor, Tensor], Tensor]) -> Partial:
    share = torch.sigmoid(b.lse - a.lse).unsqueeze(-1)
    return Partial(a.out + share * (b.out - a.out), carry(a.lse, b.lse))


def one_split(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Partial:
    hide = ~keep[:, None, None, :]
    scores = (q @ k.transpose(-1, -2)).masked_fill(hide, -1e30)
    weights = scores.softmax(-1).masked_fill(hide, 0.0)
    return Partial(weights @ v, scores.logsumexp(-1))


class SplitCrossAttention(nn.Module):
    def __init__(self, dim: int, heads: int, carry: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.carry = heads, carry
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        keep = torch.ones(memory.shape[:2], dtype=torch.bool, device=x.device) if memory_mask is None else memory_mask.bool()
        q, k, v = (
            f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, y in ((self.to_q, x), (self.to_k, memory), (self.to_v, memory))
        )
        dtype = q.dtype
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(dtype, torch.float32)
            q, k, v = q.to(wide) * q.shape[-1] ** -0.5, k.to(wide), v.to(wide)
            splits = zip(k.split(SPLIT, 2), v.split(SPLIT, 2), keep.split(SPLIT, 1))
            so_far = one_split(q, *next(splits))
            for split in splits:
                so_far = merge(so_far, one_split(q, *split), self.carry)
        return self.to_out(so_far.out.to(dtype).transpose(1, 2).flatten(2))


def subject(carry, name):
    return Subject(
        kind="cross_attention",
        build=lambda c: SplitCrossAttention(c.d_model, c.num_heads, carry),
        forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
        projections=lambda m: {n: getattr(m, f"to_{a}").weight for n, a in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out"))},
        name=name,
        mask_forms=("padding",),
        declares={
            "causal": False,
            "positions": "none",
            "attention_scale": "1/sqrt(d_head)",
            "bias": False,
            "empty_row": "zeros",
            "cross_attention": True,
            "padding_side": "both",
            "beyond_max_len": "works",
        },
    )


right = subject(carry_sum, "split-kv")
wrong = subject(carry_larger, "split-kv-larger")


def reference(x, memory, keep, weights, heads):
    wq, wk, wv, wo = weights
    q, k, v = x @ wq.T, memory @ wk.T, memory @ wv.T
    K = x.shape[-1] // heads
    o = []
    for a in range(0, x.shape[-1], K):
        s = q[..., a : a + K] @ k[..., a : a + K].mT / K**0.5
        o.append(s.masked_fill(~keep[:, None], -1e300).softmax(-1) * keep[:, None] @ v[..., a : a + K])
    return torch.cat(o, -1) @ wo.T


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    good, bad = SplitCrossAttention(24, 3, carry_sum), SplitCrossAttention(24, 3, carry_larger)
    bad.load_state_dict(good.state_dict())
    ws = [p.detach().double().requires_grad_() for p in good.parameters()]
    for T, S, same in [(1, 1, True), (5, 7, True), (3, 60, True), (2, 96, True), (5, 130, False), (3, 400, False)]:
        x, memory = torch.randn(3, T, 24), torch.randn(3, S, 24)
        some = torch.rand(3, S) > 0.4
        some[1, : S // 2], some[2] = False, False
        for keep in (torch.ones_like(some), some):
            want = reference(x.double(), memory.double(), keep, ws, 3)
            probe = torch.randn_like(want)
            want_grads = torch.autograd.grad((want * probe).sum(), ws)
            got = good(x, memory, keep)
            assert (got - want).abs().max() < 1e-5
            for a, b in zip(torch.autograd.grad((got * probe.float()).sum(), list(good.parameters())), want_grads):
                assert (a - b).abs().max() < 1e-3 * (1 + b.abs().max())
            off = (bad(x, memory, keep) - want).abs().max() / want.abs().max()
            assert (off < 1e-5) == same and (same or off > 3e-2), (T, S, off)
        d = SplitCrossAttention(24, 3, carry_sum).double()
        d.load_state_dict(good.state_dict())
        assert (d(x.double(), memory.double(), some) - want).abs().max() < 1e-12
    print("ok", __file__)
