"""A small LLaMA: rotary in halves, RMSNorm, SwiGLU, grouped queries, mask joined with the diagonal."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

def rope(x, pos):
    f = 10000.0 ** (-torch.arange(0, x.size(-1), 2, dtype=x.dtype, device=x.device) / x.size(-1))
    a, (x1, x2) = pos[:, None].to(x.dtype) * f, x.chunk(2, -1)
    c, s = a.cos(), a.sin()
    return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1)

class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h, self.g, self.d = c.num_heads, c.num_key_value_heads, c.d_model // c.num_heads
        lin = lambda i, o: nn.Linear(i, o, bias=False)
        self.q, self.k, self.v = (lin(c.d_model, n * self.d) for n in (self.h, self.g, self.g))
        self.o, self.gate, self.up = lin(c.d_model, c.d_model), lin(c.d_model, c.d_ff), lin(c.d_model, c.d_ff)
        self.down, self.n1, self.n2 = lin(c.d_ff, c.d_model), nn.RMSNorm(c.d_model, eps=1e-6), nn.RMSNorm(c.d_model, eps=1e-6)
    def forward(self, x, allow, pos):
        q, k, v = (p(self.n1(x)).unflatten(-1, (-1, self.d)).transpose(1, 2) for p in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.h // self.g, 1) for t in (rope(k, pos), v))
        a = F.scaled_dot_product_attention(rope(q, pos), k, v, attn_mask=allow)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(self.n2(x))) * self.up(self.n2(x)))

class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb, self.norm = nn.Embedding(c.vocab_size, c.d_model), nn.RMSNorm(c.d_model, eps=1e-6)
        self.layers, self.out = nn.ModuleList(Layer(c) for _ in range(c.num_layers)), nn.Linear(c.d_model, c.vocab_size, bias=False)
    def forward(self, t, mask=None):
        x, i = self.emb(t), torch.arange(t.size(1), device=t.device)
        allow = (i[:, None] >= i)[None, None]
        allow = allow if mask is None else allow & mask[:, None, None, :] | (i[:, None] == i)
        for layer in self.layers:
            x = layer(x, allow, i)
        return self.out(self.norm(x))

common = dict(kind="decoder", build=Llama, domain={"d_model": [8, 16, 24], "num_heads": [1, 2, 4]}, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**common)
declared = Subject(**common, declares={"causal": True, "positions": "rotary", "norm": "rms", "norm_placement": "pre", "bias": False,
    "activation": "swiglu", "grouped_queries": True, "padding_side": "both"})
