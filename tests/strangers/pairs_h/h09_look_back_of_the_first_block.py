"""A layer with local attention in blocks that look back by one block, in the style of lucidrains' local-attention
(einops-like reshapes, `roll` for the look-back). Sequences of one window or less take the plain path."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The block before the first one is, after torch.roll, the last block of the sequence; the mask tells distances but "
    "not that this block lies before the start. From 98 positions on (the window is 96) the first positions attend to "
    "the end of the sequence."
)
PLACE = "Wrong.visible: no `key >= 0`"
WINDOW = 96


def rearrange_heads(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # b t (h d) -> b h t d


class LocalLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.heads = c.num_heads
        self.norm, self.ff_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.to_q, self.to_kv = nn.Linear(d, d, bias=False), nn.Linear(d, 2 * d, bias=False)
        self.to_out = nn.Linear(d, d, bias=False)
        self.ff = nn.Sequential(nn.Linear(d, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, d))

    def visible(self, query, key):
        return (key <= query) & (key > query - WINDOW) & (key >= 0)

    @staticmethod
    def mix(scores, allowed, v):
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1) * allowed
        return weights @ v

    def attend(self, q, k, v, mask):
        t = q.shape[-2]
        q = q * q.shape[-1] ** -0.5
        if t <= WINDOW:
            at = torch.arange(t, device=q.device)
            allowed = self.visible(at[:, None], at[None])
            if mask is not None:
                allowed = allowed & mask[:, None, None]
            return self.mix(q @ k.mT, allowed, v)
        short = -t % WINDOW
        mask = torch.ones(q.shape[0], t, dtype=torch.bool, device=q.device) if mask is None else mask
        q, k, v = (F.pad(x, (0, 0, 0, short)).unflatten(2, (-1, WINDOW)) for x in (q, k, v))  # b h n w d
        mask = F.pad(mask, (0, short)).unflatten(1, (-1, WINDOW))  # b n w
        k, v = (torch.cat((x.roll(1, 2), x), 3) for x in (k, v))
        mask = torch.cat((mask.roll(1, 1), mask), 2)
        blocks = q.shape[2]
        start = torch.arange(blocks, device=q.device)[:, None] * WINDOW
        query = start + torch.arange(WINDOW, device=q.device)
        key = start + torch.arange(-WINDOW, WINDOW, device=q.device)
        allowed = self.visible(query[:, :, None], key[:, None]) & mask[:, None, :, None]
        return self.mix(q @ k.mT, allowed, v).flatten(2, 3)[:, :, :t]

    def forward(self, x, attention_mask=None):
        mask = None if attention_mask is None else attention_mask.bool()
        h = self.norm(x)
        q, (k, v) = self.to_q(h), self.to_kv(h).chunk(2, -1)
        out = self.attend(*(rearrange_heads(y, self.heads) for y in (q, k, v)), mask)
        x = x + self.to_out(out.transpose(1, 2).flatten(2))
        return x + self.ff(self.ff_norm(x))


class Wrong(LocalLayer):
    def visible(self, query, key):
        return (key <= query) & (key > query - WINDOW)


def make(cls):
    return Subject(
        kind="layer",
        name="local layer",
        build=cls,
        forward=lambda layer, x, attention_mask=None: layer(x, attention_mask),
        declares={"causal": True, "window": WINDOW, "positions": "none", "norm_placement": "pre", "residual": True},
    )


right, wrong = make(LocalLayer), make(Wrong)


if __name__ == "__main__":
    torch.manual_seed(0)

    def plain(layer, x, mask):
        layer = layer.double()
        x = x.double()
        h = layer.norm(x)
        q, (k, v) = layer.to_q(h), layer.to_kv(h).chunk(2, -1)
        q, k, v = (rearrange_heads(y, layer.heads) for y in (q, k, v))
        at = torch.arange(x.shape[1])
        allowed = (at[None] <= at[:, None]) & (at[None] > at[:, None] - WINDOW) & mask[:, None, None]
        w = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, -1e300).softmax(-1)
        x = x + layer.to_out((w @ v).transpose(1, 2).flatten(2))
        return x + layer.ff(layer.ff_norm(x))

    c = DrawnConfig(d_model=16, num_heads=2)
    good, bad = LocalLayer(c), Wrong(c)
    bad.load_state_dict(good.state_dict())
    for length in (9, 96, 97, 98, 192, 250):
        x = torch.randn(2, length, 16)
        mask = torch.arange(length)[None] < torch.tensor([length, length - 5])[:, None]
        truth = plain(good, x, mask)
        for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
            a, b = ((m.to(dtype)(x.to(dtype), mask) - truth).abs().amax((0, 2)) for m in (good, bad))
            free = (good(x.to(dtype)) - plain(good, x, torch.ones_like(mask))).abs().max()
            good.to(dtype)
            print(length, dtype, f"right {a.max():.1e} wrong {b.max():.1e}, at", (b > small).nonzero().flatten().tolist()[-1:])
            assert a.max() < small and (b.max() > 0.01 if length > WINDOW + 1 else b.max() < small)
            later = x.to(dtype).clone()
            later[:, length // 2 :] = 0
            moved = [(m.to(dtype)(later) - m(x.to(dtype)))[:, : length // 2].abs().max() for m in (good, bad)]
            assert moved[0] < small and (length <= WINDOW + 1 or moved[1] > 0.01)
