"""A Llama layer as serving engines write it: the residual add is fused into the following RMSNorm."""
from typing import Optional

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class FusedAddRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor, residual: Optional[torch.Tensor] = None):
        """Gives the normed sum and the sum itself, the stream to go on with."""
        if residual is not None:
            x = x + residual
        variance = x.pow(2).mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(variance + self.variance_epsilon) * self.weight, x


class Layer(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.q_size, self.kv_size = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.qkv_proj = nn.Linear(hidden_size, self.q_size + 2 * self.kv_size, bias=False)
        self.o_proj = nn.Linear(self.q_size, hidden_size, bias=False)
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.input_layernorm = FusedAddRMSNorm(hidden_size)
        self.post_attention_layernorm = FusedAddRMSNorm(hidden_size)

    def self_attn(self, h: torch.Tensor, mask: Optional[torch.Tensor]) -> torch.Tensor:
        B, T, _ = h.shape
        q, k, v = self.qkv_proj(h).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = q.view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = k.view(B, T, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = v.view(B, T, self.num_kv_heads, self.head_dim).transpose(1, 2)
        rep = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(rep, dim=1), v.repeat_interleave(rep, dim=1)
        allowed = torch.ones(T, T, dtype=torch.bool, device=h.device).tril()
        if mask is not None:
            allowed = (allowed & mask[:, None, :])[:, None] | torch.eye(T, dtype=torch.bool, device=h.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, self.q_size))

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(h).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)

    def forward(self, hidden_states: torch.Tensor, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        hidden_states, residual = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, mask)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return hidden_states + residual


subject = Subject(
    kind="layer",
    name="fused add norm layer",
    build=lambda c: Layer(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": True,
        "norm": "rms",
        "norm_placement": "pre",
        "residual": True,
        "activation": "swiglu",
        "bias": False,
        "grouped_queries": True,
    },
)
