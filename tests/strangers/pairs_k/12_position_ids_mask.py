"""A GPT-2 that makes position ids from the attention mask, so that prompts may be padded on the left."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "With a mask the position ids are cumsum(mask), without the -1: they begin at 1 there, and at 0 without a mask."
CAUSE = (
    "A mask of all ones changes the output: with a mask, position ids start at 1 (cumsum without subtracting one), "
    "without one at 0, so every token is looked up one row too late."
)


def make(first):
    class Conv1D(nn.Module):
        def __init__(self, nf, nx):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.zeros(nf))
            nn.init.normal_(self.weight, std=0.02)

        def forward(self, x):
            return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)

    class GPT2Block(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
            self.c_attn, self.c_proj = Conv1D(3 * c.d_model, c.d_model), Conv1D(c.d_model, c.d_model)
            self.mlp_fc, self.mlp_proj = Conv1D(c.d_ff, c.d_model), Conv1D(c.d_model, c.d_ff)
            self.n_head = c.num_heads

        def forward(self, x, allowed):
            B, T, C = x.shape
            q, k, v = self.c_attn(self.ln_1(x)).split(C, dim=-1)
            q, k, v = (t.view(B, T, self.n_head, -1).permute(0, 2, 1, 3) for t in (q, k, v))
            w = torch.matmul(q, k.transpose(-1, -2)) / (v.size(-1) ** 0.5)
            w = torch.where(allowed, w, torch.finfo(w.dtype).min)
            a = torch.matmul(w.softmax(-1), v).permute(0, 2, 1, 3).reshape(B, T, C)
            x = x + self.c_proj(a)
            return x + self.mlp_proj(F.gelu(self.mlp_fc(self.ln_2(x)), approximate="tanh"))

    class GPT2LMHeadModel(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.n_positions = c.max_len
            self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
            nn.init.normal_(self.wte.weight, std=0.02)
            nn.init.normal_(self.wpe.weight, std=0.01)
            self.h = nn.ModuleList([GPT2Block(c) for _ in range(c.num_layers)])
            self.ln_f = nn.LayerNorm(c.d_model)

        def forward(self, input_ids, attention_mask=None):
            T = input_ids.shape[1]
            allowed = torch.ones(T, T, dtype=torch.bool, device=input_ids.device).tril()[None, None]
            if attention_mask is None:
                position_ids = torch.arange(T, device=input_ids.device)[None]
            else:
                position_ids = attention_mask.long().cumsum(-1) - first
                position_ids = position_ids.clamp(0, self.n_positions - 1)
                allowed = allowed & attention_mask.bool()[:, None, None, :]
            if T > self.n_positions:
                raise ValueError(f"{T} tokens, but there are {self.n_positions} positions")
            x = self.wte(input_ids) + self.wpe(position_ids)
            for block in self.h:
                x = block(x, allowed)
            return F.linear(self.ln_f(x), self.wte.weight)

    return GPT2LMHeadModel


def subject(first):
    return Subject(
        kind="decoder",
        name="GPT-2 with position ids",
        build=make(first),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={
            "causal": True,
            "positions": "learned",
            "padding_side": "both",
            "tied": True,
            "norm": "layer",
            "norm_placement": "pre",
            "activation": "gelu_tanh",
        },
    )


right = subject(1)
wrong = subject(0)
