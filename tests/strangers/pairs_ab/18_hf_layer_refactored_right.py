"""A pre-norm encoder layer in the style of transformers, after its post-norm variant was split off."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class ViTLikeAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, attention_mask=None):
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        query, key, value = (
            proj(hidden_states).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(self.head_dim)
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask[:, None, None, :], torch.finfo(scores.dtype).min)
        attended = torch.matmul(nn.functional.softmax(scores, dim=-1), value)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, intermediate_size: int):
        super().__init__()
        self.self_attn = ViTLikeAttention(hidden_size, num_heads)
        self.layer_norm1 = nn.LayerNorm(hidden_size)
        self.fc1 = nn.Linear(hidden_size, intermediate_size)
        self.fc2 = nn.Linear(intermediate_size, hidden_size)
        self.activation_fn = nn.GELU()
        self.layer_norm2 = nn.LayerNorm(hidden_size)

    def forward(self, hidden_states, attention_mask=None):
        residual = hidden_states
        hidden_states = self.layer_norm1(hidden_states)
        hidden_states = self.self_attn(hidden_states, attention_mask)
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.layer_norm2(hidden_states)
        hidden_states = self.fc2(self.activation_fn(self.fc1(hidden_states)))
        return residual + hidden_states


subject = Subject(
    kind="layer",
    name="pre-norm encoder layer",
    build=lambda c: EncoderLayer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "residual": True,
    },
)
