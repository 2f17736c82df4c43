from typing import NamedTuple

import torch
from torch import nn

from veriformer.properties import Subject


class Config(NamedTuple):
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.promote_types(input_dtype, torch.float32))
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def rotate(x, theta):
    half = x.shape[-1] // 2
    inv_freq = theta ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64, device=x.device)[:, None] * inv_freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.split(half, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class QKNormAttention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)  # only on the head dim
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, hidden_states, attention_mask=None):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        query_states = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        key_states = self.q_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        query_states = rotate(query_states, self.config.rope_theta)
        key_states = rotate(key_states, self.config.rope_theta)

        key_states = key_states.repeat_interleave(self.num_key_value_groups, dim=1)
        value_states = value_states.repeat_interleave(self.num_key_value_groups, dim=1)
        scores = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scaling
        length = hidden_states.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask[:, None, None, :]
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        probs = torch.softmax(scores, dim=-1).masked_fill(~visible, 0.0)
        attn_output = torch.matmul(probs, value_states).transpose(1, 2).reshape(*input_shape, -1)
        return self.o_proj(attn_output), probs


subject = Subject(
    kind="self_attention",
    name="QKNormAttention",
    build=lambda c: QKNormAttention(Config(c.d_model, c.num_heads, c.num_key_value_heads)),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask)[0],
    weights=lambda m, x, attention_mask=None: m(x, attention_mask)[1],
    domain={"d_model": (8, 16, 32), "num_heads": (1, 2, 4)},
    mask_forms=("padding",),
    declares={
        "causal": True,
        "query_key_norm": True,
        "positions": "rotary",
        "layout": "halves",
        "base": 10000,
        "grouped_queries": True,
        "attention_scale": "1/sqrt(d_head)",
        "bias": False,
        "init": "default",
        "padding_side": "both",
        "empty_row": "zeros",
        "memory": "quadratic",
        "residual": False,
    },
)
