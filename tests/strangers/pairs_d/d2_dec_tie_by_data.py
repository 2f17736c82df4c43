import math
from types import SimpleNamespace
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = ("the head is tied by assigning .data, so embedding and head share storage but are two Parameters: each gets half of "
        "the gradient and its own optimizer state, both updates are written into one storage, and .to(dtype) parts them")
PLACE = "TinyLM.__init__: `self.head.weight.data = self.emb.weight.data`"


class Dec(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.norms = nn.ModuleList([nn.LayerNorm(d), nn.LayerNorm(d)])
        self.inp, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d))

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (z.view(B, T, self.h, -1).transpose(1, 2) for z in self.inp(self.norms[0](x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.norms[1](x))


class TinyLM(nn.Module):
    def __init__(self, c, by_data):
        super().__init__()
        self.emb, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.stack = nn.Sequential(*[Dec(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.last = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        if by_data:
            self.head.weight.data = self.emb.weight.data
        else:
            self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids) + self.pos.weight[: ids.size(1)]
        return self.head(self.last(self.stack(x)))


def _make(by_data):
    return Subject(kind="decoder", build=lambda c: TinyLM(c, by_data), forward=lambda m, tokens: m(tokens),
                   declares={"causal": True, "positions": "learned", "tied": True, "norm_placement": "pre",
                             "activation": "relu", "output_bias": False})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=1, d_ff=32, vocab_size=11, max_len=16)
    nets = []
    for s in (right, wrong):
        torch.manual_seed(0); nets.append(s.build(c).eval())
    a, b = nets
    x = torch.randint(0, 11, (2, 6))
    assert torch.equal(a(x), b(x))                                           # the forward pass is the same
    loss = lambda m: F.cross_entropy(m(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    for m in nets:
        loss(m).backward()
    i, j, eps = 3, 5, 1e-3                                                    # naive: central difference of the one matrix
    with torch.no_grad():
        w = a.emb.weight; w[i, j] += eps; up = loss(a); w[i, j] -= 2 * eps; down = loss(a); w[i, j] += eps
    fd = ((up - down) / (2 * eps)).item()
    print("difference quotient", fd, "right", a.emb.weight.grad[i, j].item(), "wrong", b.emb.weight.grad[i, j].item())
    assert abs(fd - a.emb.weight.grad[i, j].item()) < 2e-3 and (a.emb.weight.grad - b.emb.weight.grad).abs().max() > 1e-2
    n = [sum(p.numel() for p in m.parameters()) for m in nets]
    print("parameters", n); assert n[1] - n[0] == 11 * 16
    for m in nets:
        torch.optim.Adam(m.parameters(), lr=1e-2).step()
    print("after a step of Adam", (a(x) - b(x)).abs().max().item()); assert (a(x) - b(x)).abs().max() > 1e-3
