"""GPT-2 with a tied head, a left-padding-proof position count and the initialisation of its paper."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


class CausalSelfAttention(nn.Module):
    def __init__(self, c: DrawnConfig):
        super().__init__()
        self.n_head = c.num_heads
        self.c_attn = nn.Linear(c.d_model, 3 * c.d_model)
        self.c_proj = nn.Linear(c.d_model, c.d_model)
        self.attn_dropout, self.resid_dropout = nn.Dropout(c.dropout), nn.Dropout(c.dropout)

    def forward(self, x, allowed):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (h.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for h in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (C // self.n_head) ** -0.5
        att = att.masked_fill(~allowed, torch.finfo(att.dtype).min)
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    def __init__(self, c: DrawnConfig):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = CausalSelfAttention(c)
        self.c_fc, self.c_proj = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, allowed):
        x = x + self.attn(self.ln_1(x), allowed)
        return x + self.dropout(self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")))


class GPT2(nn.Module):
    def __init__(self, c: DrawnConfig):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.wpe = nn.Embedding(c.max_len, c.d_model)
        self.drop = nn.Dropout(c.dropout)
        self.h = nn.ModuleList([Block(c) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / (2 * c.num_layers) ** 0.5)
        self.tie_weights()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def tie_weights(self):
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, attention_mask=None):
        T = idx.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=idx.device).tril()[None, None]
        positions = torch.arange(T, device=idx.device)[None]
        if attention_mask is not None:
            keep = attention_mask.bool()
            allowed = allowed & keep[:, None, None, :]
            positions = (keep.long().cumsum(-1) - 1).clamp(min=0)
        x = self.drop(self.wte(idx) + self.wpe(positions))
        for block in self.h:
            x = block(x, allowed)
        return self.lm_head(self.ln_f(x))


subject = Subject(
    kind="decoder",
    name="gpt-2",
    build=GPT2,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": False,
        "tied": True,
        "residual": True,
        "padding_side": "both",
    },
)
