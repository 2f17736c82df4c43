import math
from types import SimpleNamespace
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = ("block-local attention fills the sequence up to whole blocks, but the filling is only masked when the caller gave a "
        "mask: without one, tokens of an incomplete last block attend to the fill rows")
PLACE = "BlockLocal.forward: `if keep is not None` around the masking of the fill"
BLOCK = 4


class BlockLocal(nn.Module):
    def __init__(self, d, h, lazy):
        super().__init__()
        self.h, self.lazy = h, lazy
        self.wi, self.wo = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, keep):
        b, t, d = x.shape
        fill = -t % BLOCK
        if keep is None and not self.lazy:
            keep = torch.ones(b, t, dtype=torch.bool)
        x = F.pad(x, (0, 0, 0, fill))
        q, k, v = self.wi(x).view(b, -1, BLOCK, 3, self.h, d // self.h).permute(3, 0, 1, 4, 2, 5)   # b n h BLOCK k
        s = q @ k.mT / math.sqrt(d // self.h)
        if keep is not None:
            keep = F.pad(keep, (0, fill)).view(b, -1, 1, 1, BLOCK)
            s = s.masked_fill(~keep, torch.finfo(s.dtype).min)
        y = (s.softmax(-1) @ v).transpose(2, 3).reshape(b, t + fill, d)
        return self.wo(y[:, :t])


class Blocky(nn.Module):
    def __init__(self, c, lazy):
        super().__init__()
        d = c.d_model
        self.e, self.p = nn.Embedding(c.vocab_size, d), nn.Embedding(c.max_len, d)
        self.att = nn.ModuleList(BlockLocal(d, c.num_heads, lazy) for _ in range(c.num_layers))
        self.n1 = nn.ModuleList(nn.LayerNorm(d) for _ in range(c.num_layers))
        self.n2 = nn.ModuleList(nn.LayerNorm(d) for _ in range(c.num_layers))
        self.f = nn.ModuleList(nn.Sequential(nn.Linear(d, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, d)) for _ in range(c.num_layers))
        self.out = nn.LayerNorm(d)

    def forward(self, ids, mask=None):
        x = self.e(ids) + self.p.weight[: ids.size(1)]
        keep = None if mask is None else mask.bool()
        for n1, a, n2, f in zip(self.n1, self.att, self.n2, self.f):
            x = x + a(n1(x), keep)
            x = x + f(n2(x))
        return self.out(x)


def _make(lazy):
    return Subject(kind="encoder", build=lambda c: Blocky(c, lazy),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   declares={"causal": False, "sparse": True, "positions": "learned", "norm_placement": "pre",
                             "padding_side": "right"})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=2, d_ff=32, vocab_size=11, max_len=16)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    for t in (3, 4, 7, 8):
        x = torch.randn(1, t, 16); A = a.att[0]; want = torch.zeros(t, 16)       # naive: each block for itself
        for s in range(0, t, BLOCK):
            q, k, v = A.wi(x[0, s:s + BLOCK]).chunk(3, -1)
            want[s:s + BLOCK] = torch.cat([(q[:, i:i + 8] @ k[:, i:i + 8].T / 8 ** .5).softmax(-1) @ v[:, i:i + 8] for i in (0, 8)], 1)
        e = [(m.att[0](x, None)[0] - A.wo(want)).abs().max().item() for m in (a, b)]
        ids = torch.randint(0, 11, (1, t)); o = [(m(ids) - m(ids, torch.ones(1, t))).abs().max().item() for m in (a, b)]
        print(t, "against naive", e, "no mask against all ones", o)
        assert e[0] < 1e-5 and o[0] < 1e-5 and (e[1] > 1e-3) == (o[1] > 1e-3) == (t % BLOCK > 0)
