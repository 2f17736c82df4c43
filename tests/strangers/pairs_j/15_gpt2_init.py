"""GPT-2 with its scheme of initial weights."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "only the output projection of attention is scaled by 1/sqrt(2N); the feed-forward's, by another name, is not"
CAUSE = (
    "The residual scaling 1/sqrt(2N) of the initial weights reaches attention's output projections alone; the second "
    "matrices of the feed-forward networks, which write into the residual stream too, start unscaled at 0.02."
)


class Attention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        att = F.softmax(att.masked_fill(future, float("-inf")), dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class MLP(nn.Module):
    def __init__(self, n_embd, n_inner):
        super().__init__()
        self.fc_in = nn.Linear(n_embd, n_inner)
        self.fc_out = nn.Linear(n_inner, n_embd)

    def forward(self, x):
        return self.fc_out(F.gelu(self.fc_in(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(n_embd), Attention(n_embd, n_head)
        self.ln_2, self.mlp = nn.LayerNorm(n_embd), MLP(n_embd, n_inner)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    def __init__(self, c, scaled):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.wpe = nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith(scaled):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * c.num_layers))

    @staticmethod
    def _init_weights(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def subject(scaled):
    return Subject(
        kind="decoder",
        name="GPT-2",
        build=lambda c: GPT2(c, scaled),
        forward=lambda model, tokens: model(tokens),
        declares={
            "causal": True,
            "init": "gpt2",
            "tied": True,
            "positions": "learned",
            "norm": "layer",
            "norm_placement": "pre",
            "final_norm": True,
            "activation": "gelu_tanh",
        },
    )


right = subject(("c_proj.weight", "fc_out.weight"))
wrong = subject(("c_proj.weight",))
