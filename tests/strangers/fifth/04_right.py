"""A decoder layer with sandwich norms (before and behind each sublayer), as in Gemma 2, Hugging Face style."""

from types import SimpleNamespace

import torch
from torch import nn

from veriformer.properties import Subject


class SandwichRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        output = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        output = output * (1.0 + self.weight.to(wide.dtype))
        return output.type_as(x)


class SandwichMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = nn.GELU(approximate="tanh")

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class SandwichAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.head_dim = config.hidden_size // self.num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask=None):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key = key.repeat_interleave(self.num_key_value_groups, dim=1)
        value = value.repeat_interleave(self.num_key_value_groups, dim=1)

        length = hidden_states.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool, device=hidden_states.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        weights = torch.matmul(query, key.transpose(2, 3)) * self.scaling
        weights = weights.masked_fill(~allowed, torch.finfo(weights.dtype).min).softmax(dim=-1)
        output = torch.matmul(weights, value).transpose(1, 2).reshape(*input_shape, -1)
        return self.o_proj(output)


class SandwichDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = SandwichAttention(config)
        self.mlp = SandwichMLP(config)
        self.input_layernorm = SandwichRMSNorm(config.hidden_size)
        self.post_attention_layernorm = SandwichRMSNorm(config.hidden_size)
        self.pre_feedforward_layernorm = SandwichRMSNorm(config.hidden_size)
        self.post_feedforward_layernorm = SandwichRMSNorm(config.hidden_size)

    def forward(self, hidden_states, attention_mask=None):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, attention_mask)
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.pre_feedforward_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.post_feedforward_layernorm(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


def build(c):
    return SandwichDecoderLayer(
        SimpleNamespace(
            hidden_size=c.d_model,
            intermediate_size=c.d_ff,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_key_value_heads,
        )
    )


subject = Subject(
    kind="layer",
    name="sandwich decoder layer",
    build=build,
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    projections=lambda m: {
        "q": m.self_attn.q_proj.weight,
        "k": m.self_attn.k_proj.weight,
        "v": m.self_attn.v_proj.weight,
        "o": m.self_attn.o_proj.weight,
    },
    declares={
        "causal": True,
        "positions": "none",
        "norm": "rms",
        "norm_placement": "other",
        "norm_bias": False,
        "residual": True,
        "activation": "other",
        "bias": False,
        "grouped_queries": True,
        "attention_scale": "1/sqrt(d_head)",
        "padding_side": "both",
        "structure": "other",
        "init": "default",
    },
)
