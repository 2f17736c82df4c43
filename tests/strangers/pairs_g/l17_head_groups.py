"""MPT-like causal self-attention with ALiBi, heads processed in groups of eight to bound memory. Instance with twelve heads."""

import math

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "Heads are processed in groups of eight; every group takes the ALiBi slopes from the first one on, so the ninth head and "
    "those behind it get the slopes of the first heads (up to eight heads all is well)."
)
PLACE = "GroupsFromFirstSlope.slopes_of"

HEADS_AT_ONCE = 8


def alibi_slopes(heads: int) -> list[float]:
    closest = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * i / closest) for i in range(1, closest + 1)]
    if closest < heads:
        slopes += [2 ** (-8 * i / (2 * closest)) for i in range(1, 2 * closest + 1)][0::2][: heads - closest]
    return slopes


class GroupedHeads(nn.Module):
    def __init__(self, d_model: int, heads: int, max_len: int) -> None:
        super().__init__()
        self.heads, self.d_head, self.max_len = heads, d_model // heads, max_len
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.slopes = alibi_slopes(heads)

    def slopes_of(self, first: int, count: int) -> list[float]:
        return self.slopes[first : first + count]

    def _attend(self, x, attention_mask):
        b, t, _ = x.shape
        if t > self.max_len:
            raise ValueError(f"{t} tokens, max_len is {self.max_len}")
        q, k, v = (f(x).view(b, t, self.heads, self.d_head).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        at = torch.arange(t, device=x.device)
        back = at[:, None] - at[None, :]
        see = (back >= 0).expand(b, 1, t, t)
        if attention_mask is not None:
            see = see & attention_mask.bool()[:, None, None, :]
        for first in range(0, self.heads, HEADS_AT_ONCE):
            group = slice(first, min(first + HEADS_AT_ONCE, self.heads))
            slope = torch.tensor(self.slopes_of(first, group.stop - first), dtype=torch.float64, device=x.device)
            scores = q[:, group] @ k[:, group].transpose(-1, -2) / math.sqrt(self.d_head)
            wide = torch.promote_types(scores.dtype, torch.float32)
            scores = scores.to(wide) - (slope[:, None, None] * back).to(wide)
            weights = scores.masked_fill(~see, torch.finfo(wide).min).softmax(-1).masked_fill(~see, 0.0)
            yield weights, weights.to(v.dtype) @ v[:, group]

    def forward(self, x, attention_mask=None):
        heads = torch.cat([out for _, out in self._attend(x, attention_mask)], 1)
        return self.out_proj(heads.transpose(1, 2).flatten(2))

    def attention_weights(self, x, attention_mask=None):
        return torch.cat([w for w, _ in self._attend(x, attention_mask)], 1)


class GroupsFromFirstSlope(GroupedHeads):
    def slopes_of(self, first, count):
        return self.slopes[:count]


SIZES = DrawnConfig(d_model=96, num_heads=12, num_key_value_heads=12, num_layers=1, d_ff=192, max_len=128)


def instance(cls, heads=12):
    m = cls(SIZES.d_model, heads, SIZES.max_len)
    g = torch.Generator().manual_seed(9)
    for p in m.parameters():
        nn.init.normal_(p, std=p.shape[1] ** -0.5, generator=g)
    return m.eval()


def subject(cls, name):
    return Subject(
        kind="self_attention",
        module=instance(cls),
        config=SIZES,
        name=name,
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        weights=lambda m, x, attention_mask=None: m.attention_weights(x, attention_mask),
        projections=lambda m: {n: getattr(m, a).weight for n, a in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj"))},
        mask_forms=("padding",),
        declares={
            "causal": True,
            "positions": "alibi",
            "attention_scale": "1/sqrt(d_head)",
            "bias": False,
            "empty_row": "zeros",
            "padding_side": "both",
            "max_len": 128,
            "beyond_max_len": "error",
        },
    )


right = subject(GroupedHeads, "alibi-groups")
wrong = subject(GroupsFromFirstSlope, "alibi-groups-first")


def reference(m, x, mask):
    x = x.double()
    q, k, v = (x @ w.weight.double().T for w in (m.q_proj, m.k_proj, m.v_proj))
    T, K = x.shape[1], m.d_head
    back = (torch.arange(T)[:, None] - torch.arange(T)).double()
    see = (back >= 0) & mask[:, None]
    base = 2 ** int(math.log2(m.heads))
    o = []
    for h in range(m.heads):
        slope = 2.0 ** (-8 * (h + 1) / base) if h < base else 2.0 ** (-4 * (2 * (h - base) + 1) / base)
        c = slice(h * K, h * K + K)
        s = q[..., c] @ k[..., c].mT / K**0.5 - slope * back
        o.append(s.masked_fill(~see, -torch.inf).softmax(-1).nan_to_num(0.0) @ v[..., c])
    return torch.cat(o, -1) @ m.out_proj.weight.double().T


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        for heads, same in [(1, True), (2, True), (4, True), (6, True), (8, True), (12, False), (16, False)]:
            good, bad = instance(GroupedHeads, heads), instance(GroupsFromFirstSlope, heads)
            for T in (2, 9, 100):
                x, mask = torch.randn(2, T, 96), torch.rand(2, T) > 0.2
                ones = torch.ones_like(mask)
                for keep in (ones, mask):
                    want = reference(good, x, keep)
                    assert (good(x, keep) - want).abs().max() < 1e-4
                    off = (bad(x, keep) - want).abs().max()
                    assert (off < 1e-4) == same or T == 2 and keep is mask, (heads, T, off)
                    assert same or T < 9 or off > 1e-2
                assert (instance(GroupedHeads, heads).double()(x.double(), mask) - want).abs().max() < 1e-10
    print("ok", __file__)
