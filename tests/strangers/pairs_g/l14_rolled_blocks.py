"""Causal block with a window of 24: short inputs dense, longer ones in blocks of 24 that see themselves and the block before."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from veriformer.properties import Subject

WHAT = (
    "Beyond two windows the local attention brings in the previous block with torch.roll and masks by the distance within the "
    "block pair alone; the first block's previous block is then the last one of the sequence, whose keys it attends to."
)
PLACE = "in_reach_by_distance"

W = 24


def in_reach(back, at_key):
    """back: [W, 2W] query minus key within a pair of blocks; at_key: [blocks, 2W] where each key stands in the sequence."""
    return ((back >= 0) & (back < W))[None] & (at_key >= 0)[:, None]


def in_reach_by_distance(back, at_key):
    return ((back >= 0) & (back < W))[None].expand(at_key.shape[0], -1, -1)


def dense(q, k, v, keep):
    t = q.shape[2]
    back = torch.arange(t, device=q.device)[:, None] - torch.arange(t, device=q.device)
    return weigh(q, k, v, ((back >= 0) & (back < W)) & keep[:, None, None])


def weigh(q, k, v, see):
    sim = q @ k.mT * q.shape[-1] ** -0.5
    attn = sim.masked_fill(~see, torch.finfo(sim.dtype).min).softmax(-1).masked_fill(~see, 0.0)
    return attn.to(v.dtype) @ v


def blocked(q, k, v, keep, reach):
    t = q.shape[2]
    fill = -t % W
    q, k, v = (rearrange(F.pad(u, (0, 0, 0, fill)), "b h (n w) d -> b h n w d", w=W) for u in (q, k, v))
    keep = rearrange(F.pad(keep, (0, fill), value=False), "b (n w) -> b n w", w=W)

    def with_previous(u, dim):
        return torch.cat([u.roll(1, dim), u], dim + 1)

    n = q.shape[2]
    at = torch.arange(n * W, device=q.device).view(n, W)
    at_key = torch.cat([at - W, at], 1)
    back = torch.arange(W, 2 * W, device=q.device)[:, None] - torch.arange(2 * W, device=q.device)
    see = reach(back, at_key)[None, None] & with_previous(keep, 1)[:, None, :, None]
    out = weigh(q, with_previous(k, 2), with_previous(v, 2), see)
    return rearrange(out, "b h n w d -> b h (n w) d")[:, :, :t]


class LocalBlock(nn.Module):
    def __init__(self, dim, heads, hidden, reach):
        super().__init__()
        self.heads, self.reach = heads, reach
        self.norm_attn, self.norm_ff = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.ff = nn.Sequential(nn.Linear(dim, hidden, bias=False), nn.GELU(), nn.Linear(hidden, dim, bias=False))

    def forward(self, x, attention_mask=None):
        keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if attention_mask is None else attention_mask.bool()
        h = self.norm_attn(x)
        q, k, v = (rearrange(f(h), "b t (h d) -> b h t d", h=self.heads) for f in (self.to_q, self.to_k, self.to_v))
        o = dense(q, k, v, keep) if x.shape[1] <= 2 * W else blocked(q, k, v, keep, self.reach)
        x = x + self.to_out(rearrange(o, "b h t d -> b t (h d)"))
        return x + self.ff(self.norm_ff(x))


def subject(reach, name):
    return Subject(
        kind="layer",
        build=lambda c: LocalBlock(c.d_model, c.num_heads, c.d_ff, reach),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        projections=lambda m: {"q": m.to_q.weight, "k": m.to_k.weight, "v": m.to_v.weight, "o": m.to_out.weight},
        name=name,
        mask_forms=("padding",),
        declares={
            "causal": True,
            "window": W,
            "positions": "none",
            "attention_scale": "1/sqrt(d_head)",
            "norm": "layer",
            "norm_placement": "pre",
            "residual": True,
            "activation": "gelu",
            "bias": False,
            "cross_attention": False,
            "padding_side": "both",
            "beyond_max_len": "works",
        },
    )


right = subject(in_reach, "local-blocks")
wrong = subject(in_reach_by_distance, "local-blocks-rolled")


def reference(m, x, mask):
    p = {k: v.double() for k, v in m.named_parameters()}
    x = x.double()
    D = x.shape[-1]
    K = D // m.heads
    h = F.layer_norm(x, (D,), p["norm_attn.weight"], p["norm_attn.bias"])
    q, k, v = (h @ p[f"to_{n}.weight"].T for n in "qkv")
    o = torch.zeros_like(x)
    for b in range(len(x)):
        for t in range(x.shape[1]):
            keys = [s for s in range(max(0, t - W + 1), t + 1) if mask[b, s]]
            for a in range(0, D, K) if keys else ():
                s = k[b, keys, a : a + K] @ q[b, t, a : a + K] / K**0.5
                o[b, t, a : a + K] = s.softmax(0) @ v[b, keys, a : a + K]
    x = x + o @ p["to_out.weight"].T
    h = F.layer_norm(x, (D,), p["norm_ff.weight"], p["norm_ff.bias"])
    return x + F.gelu(h @ p["ff.0.weight"].T) @ p["ff.2.weight"].T


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    good, bad = LocalBlock(24, 3, 40, in_reach), LocalBlock(24, 3, 40, in_reach_by_distance)
    bad.load_state_dict(good.state_dict())
    with torch.no_grad():
        for T, same in [(1, True), (30, True), (48, True), (50, False), (72, False), (100, False)]:
            x = torch.randn(2, T, 24)
            ones = torch.ones(2, T, dtype=torch.bool)
            some = torch.rand(2, T) > 0.3
            for mask in (ones, some):
                want = reference(good, x, mask)
                assert (good(x, mask) - want).abs().max() < 1e-4
                off = (bad(x, mask) - want).abs().max()
                assert (off < 1e-4) == same and (same or off > 1e-2), (T, off)
            d = LocalBlock(24, 3, 40, in_reach).double()
            d.load_state_dict(good.state_dict())
            assert (d(x.double(), some) - want).abs().max() < 1e-10
        torch.testing.assert_close(bad(x)[:, W:], good(x)[:, W:])
    print("ok", __file__)
