from types import SimpleNamespace
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = ("the rolling cache of a sliding-window decoder evicts down to the last `window` keys before attention instead of "
        "after it, so when several tokens arrive at once the earlier ones of the chunk have lost keys that are in their window")
PLACE = "Mistralish.step: trimming of k, v before the scores"
W = 4


def rope(x, pos):
    half = x.size(-1) // 2
    ang = pos[:, None].to(x) * 10000.0 ** (-torch.arange(half).to(x) / half)
    c, s = ang.cos(), ang.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


class Mistralish(nn.Module):
    def __init__(self, c, trim_first):
        super().__init__()
        d, self.h, self.trim_first = c.d_model, c.num_heads, trim_first
        self.embed = nn.Embedding(c.vocab_size, d)
        self.norm_a, self.norm_f, self.norm_o = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, c.d_ff), nn.Linear(c.d_ff, d)
        self.lm = nn.Linear(d, c.vocab_size, bias=False)

    def step(self, ids, past=None):
        start = 0 if past is None else past[2]
        b, t = ids.shape
        x = self.embed(ids)
        n = self.norm_a(x)
        q, k, v = (f(n).view(b, t, self.h, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        pos = torch.arange(start, start + t)
        q, k = rope(q, pos), rope(k, pos)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            if self.trim_first:
                k, v = k[:, :, -W:], v[:, :, -W:]
        kpos = torch.arange(start + t - k.size(2), start + t)
        gap = pos[:, None] - kpos[None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=(gap >= 0) & (gap < W))
        x = x + self.o(y.transpose(1, 2).reshape(b, t, -1))
        x = x + self.down(F.gelu(self.up(self.norm_f(x))))
        return self.lm(self.norm_o(x)), (k[:, :, -W:], v[:, :, -W:], start + t)

    def forward(self, ids):
        return self.step(ids)[0]


def run_chunks(m, chunks):
    past, outs = None, []
    for c in chunks:
        y, past = m.step(c, past)
        outs.append(y)
    return torch.cat(outs, 1)


def _make(flag):
    return Subject(kind="decoder", build=lambda c: Mistralish(c, flag), forward=lambda m, tokens: m(tokens), cache=run_chunks,
                   declares={"causal": True, "window": W, "positions": "rotary", "layout": "halves", "stacked": False},
                   domain={"d_model": [16, 32], "num_heads": [2, 4]})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, d_ff=32, vocab_size=11)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    x = torch.randint(0, 11, (2, 12))
    naive = torch.cat([rt for i in range(12) for rt in [a(x[:, max(0, i - W + 1): i + 1])[:, -1:]]], 1)  # one window each
    for split in ([1] * 12, [5, 1, 1, 5], [6, 3, 3]):
        e = [(run_chunks(m, x.split(split, 1)) - naive).abs().max().item() for m in (a, b)]
        print(split, "right", e[0], "wrong", e[1])
        assert e[0] < 1e-4 and (e[1] > 1e-3 if max(split[1:]) > 1 else e[1] < 1e-4)
