"""A causal linear-attention decoder (elu + 1 features, running sums), learned positions."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

class LinAttn(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h, self.qkv, self.o = c.num_heads, nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.h, -1)).unbind(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if mask is not None:
            k = k * mask[:, :, None, None]
        kv = torch.einsum("bthk,bthe->bthke", k, v).cumsum(1)
        den = torch.einsum("bthk,bthk->bth", q, k.cumsum(1)).clamp(min=1e-6)
        return self.o((torch.einsum("bthk,bthke->bthe", q, kv) / den[..., None]).flatten(2))

class LM(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.emb, self.pos, self.head = nn.Embedding(c.vocab_size, d), nn.Embedding(c.max_len, d), nn.Linear(d, c.vocab_size)
        self.attn = nn.ModuleList(LinAttn(c) for _ in range(c.num_layers))
        self.ff = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, d)) for _ in self.attn)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in self.attn)
    def forward(self, t, mask=None):
        x = self.emb(t) + self.pos(torch.arange(t.shape[1], device=t.device))
        for n, a, f in zip(self.norms, self.attn, self.ff):
            x = x + a(n(x), mask)
            x = x + f(x)
        return self.head(x)

common = dict(kind="decoder", build=LM, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**common)
declared = Subject(**common, declares={"causal": True, "positions": "learned", "norm_placement": "pre", "norm": "layer", "final_norm": False, "activation": "relu",
    "memory": "linear", "padding_side": "right", "structure": "other"})
