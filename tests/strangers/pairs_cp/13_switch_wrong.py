"""Switch Transformer as a decoder: each token goes to one expert; tokens are sorted by expert, no capacity."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Switch(nn.Module):
    def __init__(self, d, d_ff, experts=4):
        super().__init__()
        self.route = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, d_ff), nn.ReLU(), nn.Linear(d_ff, d)) for _ in range(experts)
        )

    def forward(self, x):
        tokens = x.flatten(0, 1)
        gate, expert = self.route(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        sizes = torch.bincount(expert, minlength=len(self.experts)).tolist()
        batches = tokens[order].split(sizes)
        done = torch.cat([run(batch) for run, batch in zip(self.experts, batches)])
        done = done[order]
        return (gate[:, None] * done).view_as(x)


class SwitchBlock(nn.Module):
    def __init__(self, d, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.pre_attn, self.pre_moe = nn.LayerNorm(d), nn.LayerNorm(d)
        self.in_proj, self.out_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.moe = Switch(d, d_ff)

    def forward(self, x):
        B, T, D = x.shape
        qkv = self.in_proj(self.pre_attn(x)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out_proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.moe(self.pre_moe(x))


class SwitchLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList([SwitchBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


subject = Subject(
    kind="decoder",
    build=SwitchLM,
    forward=lambda m, tokens: m(tokens),
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre"},
)

WHAT = "Line 25: results are put back by the permutation that sorted the tokens, not by its inverse: tokens get what the experts made of others."
