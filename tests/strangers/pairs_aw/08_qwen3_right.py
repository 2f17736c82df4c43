"""Qwen3 (HF style): per-head RMSNorm on queries and keys before the rotary embedding, grouped queries, no biases."""
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from veriformer.properties import Subject


class Qwen3RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class Qwen3RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=1000000):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x, position_ids):
        inv_freq = 1.0 / (self.base ** (torch.arange(0, self.dim, 2, dtype=torch.float64, device=x.device) / self.dim))
        freqs = position_ids.double()[:, None] * inv_freq[None, :]
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


class Qwen3Attention(nn.Module):
    def __init__(self, hidden_size, num_heads, num_key_value_heads):
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.num_key_value_groups = num_heads // num_key_value_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)
        self.q_norm = Qwen3RMSNorm(self.head_dim)
        self.k_norm = Qwen3RMSNorm(self.head_dim)

    def forward(self, hidden_states, position_embeddings, attention_mask):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query_states = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        key_states = self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, *position_embeddings)
        key_states = key_states.repeat_interleave(self.num_key_value_groups, dim=1)
        value_states = value_states.repeat_interleave(self.num_key_value_groups, dim=1)
        attn = scaled_dot_product_attention(query_states, key_states, value_states, attn_mask=attention_mask)
        return self.o_proj(attn.transpose(1, 2).reshape(*input_shape, -1))


class Qwen3MLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = Qwen3Attention(c.d_model, c.num_heads, c.num_key_value_heads)
        self.mlp = Qwen3MLP(c.d_model, c.d_ff)
        self.input_layernorm = Qwen3RMSNorm(c.d_model)
        self.post_attention_layernorm = Qwen3RMSNorm(c.d_model)

    def forward(self, hidden_states, position_embeddings, attention_mask):
        residual = hidden_states
        hidden_states = self.self_attn(self.input_layernorm(hidden_states), position_embeddings, attention_mask)
        hidden_states = residual + hidden_states
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Qwen3ForCausalLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Qwen3DecoderLayer(c) for _ in range(c.num_layers)])
        self.norm = Qwen3RMSNorm(c.d_model)
        self.rotary_emb = Qwen3RotaryEmbedding(c.d_model // c.num_heads)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids):
        hidden_states = self.embed_tokens(input_ids)
        length = input_ids.shape[1]
        position_embeddings = self.rotary_emb(hidden_states, torch.arange(length, device=input_ids.device))
        causal_mask = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings, causal_mask)
        return self.lm_head(self.norm(hidden_states))


subject = Subject(
    kind="decoder",
    name="Qwen3",
    build=Qwen3ForCausalLM,
    forward=lambda m, tokens: m(tokens),
    domain={"d_model": (16, 32), "num_heads": (2, 4)},
    declares={
        "positions": "rotary",
        "layout": "halves",
        "base": 1000000,
        "query_key_norm": True,
        "grouped_queries": True,
        "tied": True,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
    },
)
