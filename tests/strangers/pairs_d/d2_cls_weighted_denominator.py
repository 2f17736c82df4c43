import math
from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("position-weighted mean (weights 1, 2, ..., n over real tokens) divides by the sum of the weights of all slots, padding "
        "included, so the pooled vector of a padded sample shrinks")
PLACE = "WeightedMean.forward: denominator, sum of the weights before they are masked"


class CausalLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h, self.n1, self.n2 = h, nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(d, ff), nn.GELU(), nn.Linear(ff, d))

    def forward(self, x, ok):
        b, t, d = x.shape
        y = self.n1(x)
        q, k, v = (f(y).view(b, t, self.h, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = (q @ k.mT / math.sqrt(d // self.h)).masked_fill(~ok, torch.finfo(x.dtype).min)
        x = x + self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class WeightedMean(nn.Module):
    def __init__(self, c, all_slots):
        super().__init__()
        self.all_slots = all_slots
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(CausalLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.score = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)

    def forward(self, ids, mask=None):
        t = ids.size(1)
        keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        ok = torch.ones(t, t, dtype=torch.bool).tril() & keep[:, None, None]
        x = self.tok(ids) + self.pos.weight[:t]
        for layer in self.layers:
            x = layer(x, ok)
        w = torch.arange(1, t + 1).to(x).expand(ids.shape)
        total = w.sum(1, keepdim=True) if self.all_slots else (w * keep).sum(1, keepdim=True)
        pooled = torch.einsum("bt,btd->bd", w * keep, self.norm(x)) / total.clamp(min=1)
        return self.score(pooled)


def _make(flag):
    return Subject(kind="classifier", build=lambda c: WeightedMean(c, flag),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   declares={"pooling": "weighted", "positions": "learned", "norm_placement": "pre", "final_norm": True,
                             "padding_side": "right", "activation": "gelu"})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=2, d_ff=32, vocab_size=11, max_len=16, num_classes=3)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    x = torch.randint(0, 11, (1, 7))
    for n in (7, 6, 3):
        h = a.tok(x[:, :n]) + a.pos.weight[:n]                              # naive: cut, then a plain weighted sum
        for layer in a.layers:
            h = layer(h, torch.ones(n, n, dtype=torch.bool).tril())
        naive = a.score(sum((i + 1) * a.norm(h)[0, i] for i in range(n)) / sum(range(1, n + 1)))
        e = [(m(x, (torch.arange(7) < n)[None])[0] - naive).abs().max().item() for m in (a, b)]
        print(7 - n, "padded: right", e[0], "wrong", e[1])
        assert e[0] < 1e-4 and (e[1] > 1e-2) == (n < 7)
