import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject


@dataclass
class GPTConfig:
    n_embd: int = 768
    n_head: int = 12
    n_layer: int = 12
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    """One of n_layer blocks' attention, with its weights as in GPT-2."""

    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd

        # apply special scaled init to the residual projections, per GPT-2 paper
        for pn, p in self.named_parameters():
            if pn.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))
        # init all weights
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)

    def forward(self, x, mask=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device).tril().view(1, 1, T, T)
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        att = att.masked_fill(~allowed, torch.finfo(att.dtype).min)
        att = F.softmax(att, dim=-1).masked_fill(~allowed, 0.0)
        y = self.attn_dropout(att) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y)), att


subject = Subject(
    kind="self_attention",
    name="GPT-2 attention",
    build=lambda c: CausalSelfAttention(GPTConfig(c.d_model, c.num_heads, c.num_layers, c.dropout)),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask)[0],
    weights=lambda m, x, attention_mask=None: m(x, attention_mask)[1],
    projections=lambda m: dict(
        zip(
            ("q", "k", "v", "q_bias", "k_bias", "v_bias", "o", "o_bias"),
            (
                *m.c_attn.weight.data.split(m.n_embd),
                *m.c_attn.bias.data.split(m.n_embd),
                m.c_proj.weight.data,
                m.c_proj.bias.data,
            ),
        )
    ),
    mask_forms=("padding",),
    declares={
        "causal": True,
        "positions": "none",
        "attention_scale": "1/sqrt(d_head)",
        "bias": True,
        "init": "gpt2",
        "padding_side": "both",
        "empty_row": "zeros",
        "memory": "quadratic",
        "residual": False,
    },
)
