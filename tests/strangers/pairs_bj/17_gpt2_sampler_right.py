"""GPT-2 with its sampler: temperature, then the k best, then one draw per sequence."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.c_fc = nn.Linear(n_embd, n_inner)
        self.c_out = nn.Linear(n_inner, n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n_positions = c.max_len
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.wpe = nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)

    @torch.no_grad()
    def sample(self, idx, steps, temperature=1.0, top_k=None):
        drawn_from = []
        for _ in range(steps):
            logits = self(idx[:, -self.n_positions :])[:, -1] / temperature
            if top_k is not None:
                best = torch.topk(logits, min(top_k, logits.size(-1)), dim=-1).values
                kth = best[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            probs = F.softmax(logits, dim=-1)
            drawn_from.append(probs)
            idx = torch.cat((idx, torch.multinomial(probs, 1)), dim=1)
        return idx, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT-2",
    build=GPT2,
    forward=lambda m, tokens: m(tokens),
    sampling=lambda m, tokens, steps, temperature=1.0, top_k=None: m.sample(tokens, steps, temperature, top_k),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": False,
        "tied": True,
        "beyond_max_len": "error",
    },
)
