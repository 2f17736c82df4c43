import math
from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("cross-attention keys are projected from a detached memory (left over from keys that were computed once and kept), so "
        "outputs are right but the encoder learns through the values alone: its gradient lacks the part through the scores")
PLACE = "Cross.forward: `self.k(memory.detach())`"


class Cross(nn.Module):
    def __init__(self, d, h, cut=False):
        super().__init__()
        self.h, self.cut = h, cut
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, memory, ok):
        (b, t, d), s = x.shape, memory.size(1)
        q = self.q(x).view(b, t, self.h, -1).transpose(1, 2)
        k = self.k(memory.detach() if self.cut else memory).view(b, s, self.h, -1).transpose(1, 2)
        v = self.v(memory).view(b, s, self.h, -1).transpose(1, 2)
        w = (q @ k.transpose(2, 3)) / math.sqrt(d // self.h)
        w = torch.softmax(w.masked_fill(~ok, torch.finfo(w.dtype).min), -1)
        return self.o((w @ v).transpose(1, 2).reshape(b, t, d))


class Side(nn.Module):
    def __init__(self, c, decoder, cut):
        super().__init__()
        d = c.d_model
        self.a, self.x = Cross(d, c.num_heads), Cross(d, c.num_heads, cut) if decoder else None
        self.f = nn.Sequential(nn.Linear(d, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, d))
        self.n = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 + decoder))

    def forward(self, x, ok, memory=None, memory_ok=None):
        y = self.n[0](x)
        x = x + self.a(y, y, ok)
        if self.x is not None:
            x = x + self.x(self.n[2](x), memory, memory_ok)
        return x + self.f(self.n[1](x))


class Model(nn.Module):
    def __init__(self, c, cut):
        super().__init__()
        self.src, self.tgt, self.pos = (nn.Embedding(n, c.d_model) for n in (c.vocab_size, c.vocab_size, c.max_len))
        self.enc = nn.ModuleList(Side(c, False, cut) for _ in range(c.num_layers))
        self.dec = nn.ModuleList(Side(c, True, cut) for _ in range(c.num_layers))
        self.mid, self.end, self.head = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, source, target, source_mask=None, target_mask=None):
        sm = (torch.ones_like(source) if source_mask is None else source_mask).bool()[:, None, None]
        tm = (torch.ones_like(target) if target_mask is None else target_mask).bool()[:, None, None]
        m, t = self.src(source) + self.pos.weight[: source.size(1)], target.size(1)
        for layer in self.enc:
            m = layer(m, sm)
        m, y = self.mid(m), self.tgt(target) + self.pos.weight[:t]
        for layer in self.dec:
            y = layer(y, tm & torch.ones(t, t, dtype=torch.bool).tril(), m, sm)
        return self.head(self.end(y))


def _make(cut):
    return Subject(kind="encoder_decoder", build=lambda c: Model(c, cut),
                   forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
                   declares={"causal": True, "positions": "learned", "norm_placement": "pre", "final_norm": True,
                             "padding_side": "right", "activation": "gelu"})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=2, d_ff=32, vocab_size=11, max_len=16)
    a, b = right.build(c).eval().double(), wrong.build(c).eval().double(); b.load_state_dict(a.state_dict())
    s, t = torch.randint(0, 11, (1, 5)), torch.randint(0, 11, (1, 4)); g = torch.randn(1, 4, 11, dtype=torch.float64)
    assert torch.equal(a(s, t), b(s, t))
    for n in (a, b):
        (n(s, t) * g).sum().backward()
    w, eps, worst = a.src.weight, 1e-5, [0.0, 0.0]
    for j in range(16):                                                  # naive: difference quotients of one embedding
        with torch.no_grad():
            w[s[0, 0], j] += eps; up = (a(s, t) * g).sum(); w[s[0, 0], j] -= 2 * eps; down = (a(s, t) * g).sum(); w[s[0, 0], j] += eps
        for i, n in enumerate((a, b)):
            worst[i] = max(worst[i], abs(((up - down) / (2 * eps)).item() - n.src.weight.grad[s[0, 0], j].item()))
    print("gradient against difference quotient: right", worst[0], "wrong", worst[1])
    assert worst[0] < 1e-6 and worst[1] > 1e-3
