import math
from types import SimpleNamespace
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = ("the token shift uses torch.roll, which wraps around: position 0 is mixed with the last token of the sequence, "
        "and through attention so is every later position")
PLACE = "shift(): torch.roll instead of padding with a zero"


def shift(x, wrap):
    return torch.roll(x, 1, dims=1) if wrap else F.pad(x, (0, 0, 1, -1))


class Mixer(nn.Module):
    def __init__(self, d, h, ff, wrap):
        super().__init__()
        self.h, self.wrap = h, wrap
        self.na, self.nf = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mix_a, self.mix_f = nn.Parameter(torch.rand(d)), nn.Parameter(torch.rand(d))
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.w1, self.w2 = nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        y = torch.lerp(shift(self.na(x), self.wrap), self.na(x), self.mix_a)
        q, k, v = (f(y).view(b, t, self.h, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = torch.einsum("bhik,bhjk->bhij", q, k) / math.sqrt(d // self.h)
        s = s + torch.full((t, t), -math.inf).to(s).triu(1)
        x = x + self.o(torch.einsum("bhij,bhjk->bihk", s.softmax(-1), v).reshape(b, t, d))
        y = torch.lerp(shift(self.nf(x), self.wrap), self.nf(x), self.mix_f)
        return x + self.w2(F.relu(self.w1(y)).square())


class Shifty(nn.Module):
    def __init__(self, c, wrap):
        super().__init__()
        self.e = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Mixer(c.d_model, c.num_heads, c.d_ff, wrap) for _ in range(c.num_layers))
        self.n, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.e(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.n(x))


def _make(wrap):
    return Subject(kind="decoder", build=lambda c: Shifty(c, wrap), forward=lambda m, tokens: m(tokens),
                   declares={"causal": True, "positions": "other", "norm_placement": "pre", "activation": "other",
                             "structure": "other"})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=2, d_ff=32, vocab_size=11)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    z = torch.randn(1, 5, 3)                                   # naive: y[t] = x[t - 1], y[0] = 0
    naive = torch.stack([z[0, i - 1] if i else torch.zeros(3) for i in range(5)])
    assert torch.equal(shift(z, False)[0], naive) and not torch.equal(shift(z, True)[0], naive)
    x = torch.randint(0, 11, (1, 7)); y = x.clone(); y[0, -1] = (y[0, -1] + 1) % 11
    e = [(m(x) - m(y))[0, :-1].abs().max().item() for m in (a, b)]
    p = [max((m(x)[:, :i] - m(x[:, :i])).abs().max().item() for i in range(1, 7)) for m in (a, b)]
    print("last token changed, earlier outputs move by: right", e[0], "wrong", e[1], "prefixes", p)
    assert e[0] == 0 and e[1] > 1e-3 and p[0] < 1e-4 and p[1] > 1e-3
