import math
from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("the local layers narrow the shared mask in place (&=), so every global layer after the first local one "
        "is confined to the local band as well and distant tokens are lost")
PLACE = "LocalGlobal.forward: mask of the local layers, `allowed &= band`"
BAND = 2


def waves(t, d, like):
    f = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    a = torch.arange(t, dtype=torch.float64)[:, None] * f
    return torch.stack([a.sin(), a.cos()], -1).flatten(1)[:, :d].to(like)


class Block(nn.Module):
    def __init__(self, d, heads, ff):
        super().__init__()
        self.heads, self.n1, self.n2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.GELU(), nn.Linear(ff, d))

    def forward(self, x, allowed):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        s = s.masked_fill(~allowed, torch.finfo(s.dtype).min)
        x = x + self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.n2(x))


class LocalGlobal(nn.Module):
    def __init__(self, c, in_place):
        super().__init__()
        self.in_place = in_place
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens):
        t = tokens.size(1)
        x = self.emb(tokens)
        x = x + waves(t, x.size(-1), x)
        i = torch.arange(t, device=tokens.device)
        allowed = i[:, None] >= i[None, :]
        band = i[:, None] - i[None, :] < BAND
        for n, block in enumerate(self.blocks):
            mask = allowed
            if n % 2 == 0:                      # even layers are local, odd ones global
                if self.in_place:
                    mask &= band
                else:
                    mask = mask & band
            x = block(x, mask)
        return self.head(self.norm(x))


def _make(in_place):
    return Subject(kind="decoder", build=lambda c: LocalGlobal(c, in_place), forward=lambda m, tokens: m(tokens),
                   declares={"causal": True, "positions": "sinusoidal", "layout": "interleaved", "norm": "layer", "norm_placement": "pre"},
                   domain={"num_layers": [2, 3, 4]})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    c = SimpleNamespace(d_model=16, num_heads=2, d_ff=32, vocab_size=11, num_layers=2)
    torch.manual_seed(0); a = right.build(c).eval()
    b = wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    x = torch.randint(0, 11, (1, 10)); y = x.clone(); y[0, 0] = (y[0, 0] + 1) % 11
    h = a.emb(x) + waves(10, 16, a.emb.weight)   # naive: masks written entry by entry
    for n in range(2):
        m = torch.tensor([[j <= i and (n == 1 or i - j < BAND) for j in range(10)] for i in range(10)])
        h = a.blocks[n](h, m)
    naive = a.head(a.norm(h))
    reach = [(m(x) - m(y))[0, -1].abs().max().item() for m in (a, b)]
    print("right-naive", (a(x) - naive).abs().max().item(), "wrong-naive", (b(x) - naive).abs().max().item(), "reach", reach)
    assert torch.allclose(a(x), naive, atol=1e-5) and not torch.allclose(b(x), naive, atol=1e-3)
    assert reach[0] > 1e-5 and reach[1] == 0
