import math
from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("the feed-forward runs over the sequence in chunks of 4 to save memory and counts them by floor division, so the "
        "positions of an incomplete last chunk never pass through it (unless the whole sequence is shorter than a chunk)")
PLACE = "Layer.feed: number of chunks"
CHUNK = 4


class Layer(nn.Module):
    def __init__(self, c, floor):
        super().__init__()
        d = c.d_model
        self.h, self.floor = c.num_heads, floor
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d) for _ in range(4))
        self.w1, self.w2 = nn.Linear(d, c.d_ff), nn.Linear(c.d_ff, d)

    def feed(self, x):
        t = x.size(1)
        if t < CHUNK:
            return self.w2(torch.relu(self.w1(x)))
        out = torch.zeros_like(x)
        for i in range(t // CHUNK if self.floor else math.ceil(t / CHUNK)):
            s = slice(i * CHUNK, (i + 1) * CHUNK)
            out[:, s] = self.w2(torch.relu(self.w1(x[:, s])))
        return out

    def forward(self, x, mask=None):
        b, t, d = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(b, t, self.h, -1).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        s = q @ k.mT / math.sqrt(d // self.h)
        if mask is not None:
            s = s.masked_fill(~mask.bool()[:, None, None], torch.finfo(s.dtype).min)
        x = x + self.wo((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.feed(self.norm2(x))


def _make(floor):
    return Subject(kind="layer", build=lambda c: Layer(c, floor), mask_forms=("padding",),
                   forward=lambda m, x, attention_mask=None: m(x, attention_mask),
                   declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "residual": True,
                             "activation": "relu", "bias": True})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, d_ff=32)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    for t in (3, 4, 6, 8, 9):
        x = torch.randn(2, t, 16)
        naive = torch.stack([a.w2(a.w1(x[:, i]).clamp(min=0)) for i in range(t)], 1)      # one position at a time
        e = [(m.feed(x) - naive).abs().max().item() for m in (a, b)]
        p = [(m(x.flip(1)).flip(1) - m(x)).abs().max().item() for m in (a, b)]            # no positions: order moves along
        print(t, "feed-forward", e, "reversed", p)
        bad = t > CHUNK and t % CHUNK > 0
        assert e[0] < 1e-5 and p[0] < 1e-5 and (e[1] > 1e-2) == (p[1] > 1e-3) == bad
