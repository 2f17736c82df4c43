"""Mistral: a sliding window in every layer and a rolling key-value cache."""

import torch
from torch import nn
from torch.nn.functional import silu

from veriformer.properties import Subject

WINDOW = 4


class MistralRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotary(x, position_ids):
    dim = x.shape[-1]
    inv_freq = 1.0 / (10000.0 ** (torch.arange(0, dim, 2, device=x.device).double() / dim))
    freqs = position_ids.double()[:, None] * inv_freq
    emb = torch.cat((freqs, freqs), dim=-1)
    return x * emb.cos().to(x.dtype) + rotate_half(x) * emb.sin().to(x.dtype)


class RollingCache:
    """What one layer keeps: the last WINDOW keys and values, with their positions."""

    def __init__(self):
        self.keys = self.values = self.positions = None

    def update(self, keys, values, positions):
        if self.keys is not None:
            keys = torch.cat((self.keys, keys), dim=2)
            values = torch.cat((self.values, values), dim=2)
            positions = torch.cat((self.positions, positions))
        self.keys, self.values, self.positions = keys[:, :, -WINDOW:], values[:, :, -WINDOW:], positions[-WINDOW:]
        return keys, values, positions


class MistralAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states, position_ids, past=None):
        batch, length, _ = hidden_states.shape
        shape = (batch, length, self.num_heads, self.head_dim)
        query = rotary(self.q_proj(hidden_states).view(shape).transpose(1, 2), position_ids)
        key = rotary(self.k_proj(hidden_states).view(shape).transpose(1, 2), position_ids)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        key_positions = position_ids
        if past is not None:
            key, value, key_positions = past.update(key, value, position_ids)
        distance = position_ids[:, None] - key_positions[None, :]
        visible = (distance >= 0) & (distance < WINDOW)
        weights = query @ key.transpose(2, 3) * self.head_dim**-0.5
        weights = weights.masked_fill(~visible, torch.finfo(weights.dtype).min).softmax(-1)
        output = (weights @ value).transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(output)


class MistralDecoderLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size):
        super().__init__()
        self.self_attn = MistralAttention(hidden_size, num_heads)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.input_layernorm = MistralRMSNorm(hidden_size)
        self.post_attention_layernorm = MistralRMSNorm(hidden_size)

    def forward(self, hidden_states, position_ids, past=None):
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), position_ids, past)
        normed = self.post_attention_layernorm(hidden_states)
        return hidden_states + self.down_proj(silu(self.gate_proj(normed)) * self.up_proj(normed))


class MistralForCausalLM(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_heads, num_layers, intermediate_size):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            MistralDecoderLayer(hidden_size, num_heads, intermediate_size) for _ in range(num_layers)
        )
        self.norm = MistralRMSNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids, past_key_values=None, seen=0):
        position_ids = torch.arange(seen, seen + input_ids.shape[1], device=input_ids.device)
        hidden_states = self.embed_tokens(input_ids)
        for i, layer in enumerate(self.layers):
            hidden_states = layer(hidden_states, position_ids, past_key_values[i] if past_key_values else None)
        return self.lm_head(self.norm(hidden_states))


def cache(model, chunks):
    past = [RollingCache() for _ in model.layers]
    seen, outputs = 0, []
    for chunk in chunks:
        outputs.append(model(chunk, past, seen))
        seen += chunk.shape[1]
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="mistral with a rolling cache",
    build=lambda c: MistralForCausalLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=cache,
    declares={
        "causal": True,
        "window": WINDOW,
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
    },
)
