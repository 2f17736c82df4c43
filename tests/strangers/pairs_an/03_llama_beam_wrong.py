WHAT = "reorder_cache reorders the keys of each layer and forgets the values, so after beam reordering each sample mixes its own old values by another sample's keys (line 51: self.key_cache[layer_idx] = self.key_cache[layer_idx].index_select(0, beam_idx))"
"""LLaMA as Hugging Face writes it, with a DynamicCache and beam search's reordering."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rotary(position_ids, dim, dtype, base=10000.0):
    inv_freq = base ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=position_ids.device) / dim)
    freqs = position_ids[:, None].double() * inv_freq[None, :]
    emb = torch.cat((freqs, freqs), dim=-1)
    return emb.cos().to(dtype), emb.sin().to(dtype)


class DynamicCache:
    def __init__(self):
        self.key_cache, self.value_cache = [], []

    def get_seq_length(self):
        return self.key_cache[0].shape[-2] if self.key_cache else 0

    def update(self, key, value, layer_idx):
        if len(self.key_cache) <= layer_idx:
            self.key_cache.append(key)
            self.value_cache.append(value)
        else:
            self.key_cache[layer_idx] = torch.cat([self.key_cache[layer_idx], key], dim=-2)
            self.value_cache[layer_idx] = torch.cat([self.value_cache[layer_idx], value], dim=-2)
        return self.key_cache[layer_idx], self.value_cache[layer_idx]

    def reorder_cache(self, beam_idx):
        for layer_idx in range(len(self.key_cache)):
            self.key_cache[layer_idx] = self.key_cache[layer_idx].index_select(0, beam_idx)


class LlamaAttention(nn.Module):
    def __init__(self, c, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_key_value_heads, c.d_model // c.num_heads
        if self.head_dim % 2:
            raise ValueError("rotary embeddings need an even head_dim")
        self.q_proj = nn.Linear(c.d_model, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(c.d_model, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(c.d_model, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, c.d_model, bias=False)

    def forward(self, x, cos, sin, allowed, past=None):
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        if past is not None:
            k, v = past.update(k, v, self.layer_idx)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        scores = q @ k.transpose(2, 3) * self.head_dim**-0.5
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1) * allowed
        return self.o_proj((weights @ v).transpose(1, 2).reshape(B, T, -1))


class LlamaMLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.up_proj = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down_proj = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, c, layer_idx):
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(c.d_model)
        self.self_attn = LlamaAttention(c, layer_idx)
        self.post_attention_layernorm = LlamaRMSNorm(c.d_model)
        self.mlp = LlamaMLP(c)

    def forward(self, x, cos, sin, allowed, past=None):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, allowed, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaForCausalLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.d_model // c.num_heads
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(LlamaDecoderLayer(c, i) for i in range(c.num_layers))
        self.norm = LlamaRMSNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        T = input_ids.shape[1]
        where = torch.arange(past, past + T, device=input_ids.device)
        x = self.embed_tokens(input_ids)
        cos, sin = rotary(where, self.head_dim, x.dtype)
        allowed = (torch.arange(past + T, device=input_ids.device)[None, :] <= where[:, None])[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, cos, sin, allowed, past_key_values)
        return self.lm_head(self.norm(x))


def cached(model, chunks, reorder=None):
    past, outputs = DynamicCache(), []
    for i, chunk in enumerate(chunks):
        outputs.append(model(chunk, past_key_values=past))
        if i == 0 and reorder is not None:
            past.reorder_cache(torch.as_tensor(reorder, device=chunk.device))
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="LLaMA",
    build=LlamaForCausalLM,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=cached,
    declares={
        "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre", "final_norm": True,
        "activation": "swiglu", "bias": False, "tied": False, "grouped_queries": True, "padding_side": "both",
    },
)
