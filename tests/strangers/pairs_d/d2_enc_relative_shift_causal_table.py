import math
from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("the Transformer-XL shift of a bidirectional encoder gets a table of the distances T-1..0 alone, as for a causal model: "
        "for keys to the right the shift yields a zero and then the next query's scores of distances that depend on T")
PLACE = "XLAttention.forward: distances of the table, before rel_shift"


def rel_shift(x):                       # row i moves left by T - 1 - i
    *lead, t, r = x.shape
    x = torch.cat([x.new_zeros(*lead, t, 1), x], -1).view(*lead, r + 1, t)
    return x[..., 1:, :].reshape(*lead, t, r)[..., :t]


class XLAttention(nn.Module):
    def __init__(self, d, h, one_sided):
        super().__init__()
        self.h, self.d, self.one_sided = h, d, one_sided
        self.q, self.k, self.v, self.r, self.o = (nn.Linear(d, d, bias=False) for _ in range(5))
        self.u, self.w = nn.Parameter(0.3 * torch.randn(h, 1, d // h)), nn.Parameter(0.3 * torch.randn(h, 1, d // h))

    def waves(self, dist, like):
        inv = 10000.0 ** (-torch.arange(0, self.d, 2).to(like) / self.d)
        a = dist.to(like)[:, None] * inv
        return torch.cat([a.sin(), a.cos()], -1)[:, : self.d]

    def forward(self, x, keep):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.h, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        dist = torch.arange(t - 1, -1 if self.one_sided else -t, -1)
        r = self.r(self.waves(dist, x)).view(len(dist), self.h, -1).transpose(0, 1)
        s = (q + self.u) @ k.mT + rel_shift((q + self.w) @ r.mT)
        s = s / math.sqrt(d // self.h)
        if keep is not None:
            s = s.masked_fill(~keep[:, None, None], torch.finfo(s.dtype).min)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class XLEncoder(nn.Module):
    def __init__(self, c, one_sided):
        super().__init__()
        d = c.d_model
        self.e = nn.Embedding(c.vocab_size, d)
        self.att = nn.ModuleList(XLAttention(d, c.num_heads, one_sided) for _ in range(c.num_layers))
        self.ff = nn.ModuleList(nn.Sequential(nn.Linear(d, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, d)) for _ in self.att)
        self.n = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * c.num_layers))

    def forward(self, ids, mask=None):
        x, keep = self.e(ids), None if mask is None else mask.bool()
        for i, (a, f) in enumerate(zip(self.att, self.ff)):
            x = self.n[2 * i](x + a(x, keep))
            x = self.n[2 * i + 1](x + f(x))
        return x


def _make(flag):
    return Subject(kind="encoder", build=lambda c: XLEncoder(c, flag),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   declares={"causal": False, "positions": "relative", "norm_placement": "post", "padding_side": "both",
                             "structure": "other"})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=1, d_ff=32, vocab_size=11)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    x, T, A = torch.randn(1, 6, 16), 6, a.att[0]
    out = torch.zeros(T, 16)
    for h in range(2):                                          # naive: one score at a time
        sl = slice(8 * h, 8 * h + 8)
        q, k, v = A.q(x)[0, :, sl], A.k(x)[0, :, sl], A.v(x)[0, :, sl]
        s = torch.stack([torch.stack([(q[i] + A.u[h, 0]) @ k[j] + (q[i] + A.w[h, 0]) @ A.r(A.waves(torch.tensor([i - j]), x))[0, sl]
                                      for j in range(T)]) for i in range(T)]) / math.sqrt(8)
        out[:, sl] = s.softmax(-1) @ v
    e = [(m.att[0](x, None)[0] - A.o(out)).abs().max().item() for m in (a, b)]
    ids = torch.randint(0, 11, (1, 5)); m = torch.tensor([[1] * 5 + [0] * 3])
    p = [(net(nn.functional.pad(ids, (0, 3)), m)[:, :5] - net(ids)).abs().max().item() for net in (a, b)]
    print("against one score at a time", e, "padded against not", p)
    assert e[0] < 1e-5 and e[1] > 1e-3 and p[0] < 1e-4 and p[1] > 1e-3
