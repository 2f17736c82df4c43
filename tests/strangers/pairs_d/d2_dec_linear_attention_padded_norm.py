from types import SimpleNamespace
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = ("in causal linear attention padding is taken out of the numerator (values zeroed) but not out of the normaliser "
        "(sum of keys), so tokens behind left padding are shrunk by the padded keys")
PLACE = "LinearAttention.forward: mask put on v alone, not on phi(k)"


def table(pos, d, like):
    f = 10000.0 ** (-torch.arange(0, d, 2).to(like) / d)
    a = pos[..., None].to(like) * f
    return torch.cat([a.sin(), a.cos()], -1)[..., :d]


class LinearAttention(nn.Module):
    def __init__(self, d, h, values_only):
        super().__init__()
        self.h, self.values_only = h, values_only
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, keep):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.h, -1) for f in (self.q, self.k, self.v))
        q, k, m = F.elu(q) + 1, F.elu(k) + 1, keep[:, :, None, None].to(x)
        if self.values_only:
            v = v * m
        else:
            k = k * m
        kv = torch.einsum("bthk,bthe->bthke", k, v).cumsum(1)
        top = torch.einsum("bthk,bthke->bthe", q, kv)
        low = torch.einsum("bthk,bthk->bth", q, k.cumsum(1))
        return self.o((top / low.clamp(min=1e-6)[..., None]).reshape(b, t, d))


class LinearLM(nn.Module):
    def __init__(self, c, values_only):
        super().__init__()
        d = c.d_model
        self.e, self.nf, self.head = nn.Embedding(c.vocab_size, d), nn.LayerNorm(d), nn.Linear(d, c.vocab_size)
        self.n1 = nn.ModuleList(nn.LayerNorm(d) for _ in range(c.num_layers))
        self.n2 = nn.ModuleList(nn.LayerNorm(d) for _ in range(c.num_layers))
        self.att = nn.ModuleList(LinearAttention(d, c.num_heads, values_only) for _ in range(c.num_layers))
        self.ff = nn.ModuleList(nn.Sequential(nn.Linear(d, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, d)) for _ in range(c.num_layers))

    def forward(self, ids, mask=None):
        keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        x = self.e(ids)
        x = x + table((keep.long().cumsum(1) - 1).clamp(min=0), x.size(-1), x)
        for n1, a, n2, f in zip(self.n1, self.att, self.n2, self.ff):
            x = x + a(n1(x), keep)
            x = x + f(n2(x))
        return self.head(self.nf(x))


def _make(flag):
    return Subject(kind="decoder", build=lambda c: LinearLM(c, flag),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   declares={"causal": True, "positions": "sinusoidal", "layout": "halves", "padding_side": "both",
                             "structure": "other"})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=2, d_ff=32, vocab_size=11)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    at, x = a.att[0], torch.randn(1, 5, 16); out = torch.zeros(5, 16)          # naive: weights written out
    for h in range(2):
        s = slice(8 * h, 8 * h + 8)
        q, k, v = F.elu(at.q(x))[0, :, s] + 1, F.elu(at.k(x))[0, :, s] + 1, at.v(x)[0, :, s]
        for t in range(5):
            w = torch.stack([q[t] @ k[j] for j in range(t + 1)]); out[t, s] = (w / w.sum()) @ v[:t + 1]
    assert torch.allclose(at(x, torch.ones(1, 5, dtype=torch.bool))[0], at.o(out), atol=1e-5)
    ids = torch.randint(0, 11, (1, 8)); m = torch.ones(1, 8); m[0, :3] = 0; r = m.flip(1)
    for name, mask, cut in (("left", m, slice(3, 8)), ("right", r, slice(0, 5))):
        e = [(n(ids, mask)[:, cut] - a(ids[:, cut])).abs().max().item() for n in (a, b)]
        print(name, "padding: right", e[0], "wrong", e[1])
        assert e[0] < 1e-4 and (e[1] > 1e-2) == (name == "left")
