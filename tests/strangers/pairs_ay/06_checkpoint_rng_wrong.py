WHAT = "Checkpointing does not restore the random state, so layers are computed again with other dropout masks in the backward: gradients are not those of the forward, line 63."
"""Decoder with gradient checkpointing, Hugging Face manner."""

import functools
import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, hidden_size, num_heads, dropout):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)
        self.attn_dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, hidden_states, causal_mask):
        q, k, v = (self.split(p(hidden_states)) for p in (self.q_proj, self.k_proj, self.v_proj))
        attn = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        attn = attn.masked_fill(~causal_mask, torch.finfo(attn.dtype).min).softmax(dim=-1)
        attn = self.attn_dropout(attn)
        return self.o_proj((attn @ v).transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size, dropout):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads, dropout)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, intermediate_size), nn.GELU(), nn.Linear(intermediate_size, hidden_size)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states, causal_mask):
        hidden_states = hidden_states + self.dropout(self.attention(self.input_layernorm(hidden_states), causal_mask))
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


class DecoderModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.embed_positions = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(
            [DecoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers)]
        )
        self.norm = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = functools.partial(
            checkpoint, use_reentrant=False, preserve_rng_state=False
        )

    def forward(self, input_ids):
        length = input_ids.size(1)
        positions = torch.arange(length, device=input_ids.device)
        causal_mask = positions[:, None] >= positions[None, :]
        hidden_states = self.embed_tokens(input_ids) + self.embed_positions(positions)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                hidden_states = self._gradient_checkpointing_func(layer, hidden_states, causal_mask)
            else:
                hidden_states = layer(hidden_states, causal_mask)
        return self.lm_head(self.norm(hidden_states))


subject = Subject(
    kind="decoder",
    name="decoder with gradient checkpointing",
    build=DecoderModel,
    forward=lambda m, tokens: m(tokens),
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "output_bias": False,
    },
)
