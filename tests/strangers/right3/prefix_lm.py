"""A prefix-LM: the first three tokens see one another both ways, the rest is causal."""
import torch
from torch import nn
from veriformer.properties import Subject

def rope(x, pos):
    f = 10000.0 ** (-torch.arange(0, x.size(-1), 2, dtype=x.dtype, device=x.device) / x.size(-1))
    a, (x1, x2) = pos[:, None].to(x.dtype) * f, x.chunk(2, -1)
    c, s = a.cos(), a.sin()
    return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1)

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h, self.n1, self.n2 = c.num_heads, nn.RMSNorm(c.d_model, 1e-6), nn.RMSNorm(c.d_model, 1e-6)
        self.qkv, self.o = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.ff = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))
    def forward(self, x, allow):
        i = torch.arange(x.shape[1], device=x.device)
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        s = (rope(q, i) @ rope(k, i).mT / q.shape[-1] ** 0.5).masked_fill(~allow, float("-inf"))
        x = x + self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.ff(self.n2(x))

class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb, self.head = nn.Embedding(c.vocab_size, c.d_model), nn.Linear(c.d_model, c.vocab_size)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
    def forward(self, t, mask=None):
        x, i = self.emb(t), torch.arange(t.shape[1], device=t.device)
        back = i[:, None] - i[None]
        allow = ((back >= 0) | (i[None] < 3))[None, None]
        if mask is not None:
            allow = allow & mask[:, None, None] | (back == 0)
        for b in self.blocks:
            x = b(x, allow)
        return self.head(x)

common = dict(kind="decoder", build=Model, domain={"d_model": [8, 16, 24], "num_heads": [1, 2, 4]}, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**common)
declared = Subject(**common, declares={"prefix": 3, "positions": "rotary", "norm": "rms", "final_norm": False, "padding_side": "right"})
