WHAT = "the cache's one counter of seen tokens is advanced by every layer, not once a step, so that from the second layer on (and in the first from the second chunk on) the rotary positions of a cached step are too large (line 20)"
"""A small Llama in the manner of transformers: DynamicCache, rotary embeddings, RMSNorm, SwiGLU."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class DynamicCache:
    def __init__(self):
        self.seen_tokens = 0
        self.key_cache, self.value_cache = [], []

    def get_seq_length(self):
        return self.seen_tokens

    def update(self, key_states, value_states, layer_idx, num_layers):
        self.seen_tokens += key_states.shape[-2]
        if len(self.key_cache) <= layer_idx:
            self.key_cache.append(key_states)
            self.value_cache.append(value_states)
        else:
            self.key_cache[layer_idx] = torch.cat([self.key_cache[layer_idx], key_states], dim=-2)
            self.value_cache[layer_idx] = torch.cat([self.value_cache[layer_idx], value_states], dim=-2)
        return self.key_cache[layer_idx], self.value_cache[layer_idx]


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rotary(x, position_ids, base=10000.0):
    d = x.shape[-1]
    inv_freq = base ** -(torch.arange(0, d, 2, dtype=torch.float64, device=x.device) / d)
    freqs = position_ids.double()[:, None] * inv_freq
    emb = torch.cat((freqs, freqs), dim=-1)
    return x * emb.cos().to(x.dtype) + rotate_half(x) * emb.sin().to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


class Attention(nn.Module):
    def __init__(self, hidden_size, num_heads, num_layers, layer_idx):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        if self.head_dim % 2:
            raise ValueError("rotary embeddings need an even head_dim")
        self.layer_idx, self.num_layers = layer_idx, num_layers
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None):
        bsz, q_len, _ = hidden_states.shape
        shape = (bsz, q_len, self.num_heads, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)

        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        position_ids = torch.arange(past, past + q_len, device=hidden_states.device)
        query, key = rotary(query, position_ids), rotary(key, position_ids)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx, self.num_layers)

        kv_len = key.shape[-2]
        allowed = torch.ones(q_len, kv_len, dtype=torch.bool, device=key.device).tril(kv_len - q_len)[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :kv_len]
        scores = query @ key.transpose(2, 3) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        probs = scores.softmax(-1).masked_fill(~allowed, 0.0)
        return self.o_proj((probs @ value).transpose(1, 2).reshape(bsz, q_len, -1))


class MLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, c, layer_idx):
        super().__init__()
        self.input_layernorm = RMSNorm(c.d_model)
        self.self_attn = Attention(c.d_model, c.num_heads, c.num_layers, layer_idx)
        self.post_attention_layernorm = RMSNorm(c.d_model)
        self.mlp = MLP(c.d_model, c.d_ff)

    def forward(self, x, attention_mask, past_key_values):
        x = x + self.self_attn(self.input_layernorm(x), attention_mask, past_key_values)
        return x + self.mlp(self.post_attention_layernorm(x))


class ForCausalLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([DecoderLayer(c, i) for i in range(c.num_layers)])
        self.norm = RMSNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask, past_key_values)
        return self.lm_head(self.norm(x))


def cached(model, chunks, attention_mask=None):
    past = DynamicCache()
    return torch.cat([model(chunk, attention_mask, past) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="small Llama",
    build=ForCausalLM,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=cached,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
    },
)
