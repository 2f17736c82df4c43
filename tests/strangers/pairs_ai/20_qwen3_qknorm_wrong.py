WHAT = "queries and keys are normalised behind the rotation: the gains of the norm do not commute with it, so that once they are trained scores depend on absolute positions: line 50"
"""Qwen3: queries and keys are normalised head by head, grouped queries, rotary positions."""
import torch
from torch import nn

from veriformer.properties import Subject


class Qwen3RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


class Qwen3Attention(nn.Module):
    def __init__(self, hidden_size, num_heads, num_kv_heads):
        super().__init__()
        self.head_dim = hidden_size // num_heads
        if self.head_dim % 2:
            raise ValueError("rotary embeddings need an even head_dim")
        self.num_key_value_groups = num_heads // num_kv_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)
        self.q_norm = Qwen3RMSNorm(self.head_dim)
        self.k_norm = Qwen3RMSNorm(self.head_dim)

    def forward(self, hidden_states, position_embeddings, attention_mask):
        hidden_shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, *position_embeddings)
        query_states, key_states = self.q_norm(query_states), self.k_norm(key_states)
        key_states = key_states.repeat_interleave(self.num_key_value_groups, dim=1)
        value_states = value_states.repeat_interleave(self.num_key_value_groups, dim=1)
        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scaling
        attn_weights = attn_weights.masked_fill(~attention_mask, torch.finfo(attn_weights.dtype).min)
        attn_output = torch.matmul(nn.functional.softmax(attn_weights, dim=-1), value_states)
        return self.o_proj(attn_output.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1))


class Qwen3MLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, num_kv_heads, intermediate_size):
        super().__init__()
        self.self_attn = Qwen3Attention(hidden_size, num_heads, num_kv_heads)
        self.mlp = Qwen3MLP(hidden_size, intermediate_size)
        self.input_layernorm = Qwen3RMSNorm(hidden_size)
        self.post_attention_layernorm = Qwen3RMSNorm(hidden_size)

    def forward(self, hidden_states, position_embeddings, attention_mask):
        residual = hidden_states
        hidden_states = self.self_attn(self.input_layernorm(hidden_states), position_embeddings, attention_mask)
        hidden_states = residual + hidden_states
        residual = hidden_states
        return residual + self.mlp(self.post_attention_layernorm(hidden_states))


class Qwen3ForCausalLM(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_heads, num_kv_heads, intermediate_size, num_layers):
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            [Qwen3DecoderLayer(hidden_size, num_heads, num_kv_heads, intermediate_size) for _ in range(num_layers)]
        )
        self.norm = Qwen3RMSNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def rotary_emb(self, x):
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=x.device)
        inv_freq = 1.0 / 10000.0 ** (steps / self.head_dim)
        freqs = torch.arange(x.shape[1], dtype=torch.float64, device=x.device)[:, None] * inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)

    def forward(self, input_ids, attention_mask=None):
        hidden_states = self.embed_tokens(input_ids)
        length = input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        if attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None, None, :]
        position_embeddings = self.rotary_emb(hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings, mask)
        return self.lm_head(self.norm(hidden_states))


subject = Subject(
    kind="decoder",
    name="Qwen3",
    build=lambda c: Qwen3ForCausalLM(
        c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff, c.num_layers
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "query_key_norm": True,
        "grouped_queries": True,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "padding_side": "both",
    },
)
