"""A Llama in the manner of Hugging Face, with a growing cache of keys and values."""
import torch
from torch import nn

from veriformer.properties import Subject


class DynamicCache:
    """Keys and values of each layer, growing."""

    def __init__(self):
        self.key_cache, self.value_cache = [], []

    def get_seq_length(self, layer_idx=0):
        return self.key_cache[layer_idx].shape[-2] if layer_idx < len(self.key_cache) else 0

    def update(self, key, value, layer_idx):
        if layer_idx == len(self.key_cache):
            self.key_cache.append(key)
            self.value_cache.append(value)
        else:
            self.key_cache[layer_idx] = torch.cat([self.key_cache[layer_idx], key], dim=-2)
            self.value_cache[layer_idx] = torch.cat([self.value_cache[layer_idx], value], dim=-2)
        return self.key_cache[layer_idx], self.value_cache[layer_idx]


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


def apply_rotary_pos_emb(x, position_ids, base=10000.0):
    dim = x.shape[-1]
    inv_freq = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim)
    angles = position_ids[:, None].double() * inv_freq
    emb = torch.cat((angles, angles), dim=-1)
    return x * emb.cos().to(x.dtype) + rotate_half(x) * emb.sin().to(x.dtype)


def repeat_kv(x, n_rep):
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, n_rep, length, dim).reshape(batch, heads * n_rep, length, dim)


class LlamaAttention(nn.Module):
    def __init__(self, hidden, num_heads, num_kv_heads, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = hidden // num_heads
        self.groups = num_heads // num_kv_heads
        self.q_proj = nn.Linear(hidden, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden, bias=False)

    def forward(self, x, attention_mask=None, past_key_values=None):
        batch, q_len, _ = x.shape
        q, k, v = (
            proj(x).view(batch, q_len, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        past = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        position_ids = torch.arange(past, past + q_len, device=x.device)
        q, k = apply_rotary_pos_emb(q, position_ids), apply_rotary_pos_emb(k, position_ids)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        k, v = repeat_kv(k, self.groups), repeat_kv(v, self.groups)
        kv_len = k.shape[-2]
        allowed = torch.ones(q_len, kv_len, dtype=torch.bool, device=x.device).tril(kv_len - q_len)
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :kv_len]
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        out = scores.softmax(dim=-1) @ v
        return self.o_proj(out.transpose(1, 2).reshape(batch, q_len, -1))


class LlamaMLP(nn.Module):
    def __init__(self, hidden, intermediate):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, hidden, num_heads, num_kv_heads, intermediate, layer_idx):
        super().__init__()
        self.self_attn = LlamaAttention(hidden, num_heads, num_kv_heads, layer_idx)
        self.mlp = LlamaMLP(hidden, intermediate)
        self.input_layernorm = LlamaRMSNorm(hidden)
        self.post_attention_layernorm = LlamaRMSNorm(hidden)

    def forward(self, x, attention_mask=None, past_key_values=None):
        x = x + self.self_attn(self.input_layernorm(x), attention_mask, past_key_values)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaForCausalLM(nn.Module):
    def __init__(self, vocab, hidden, num_heads, num_kv_heads, num_layers, intermediate):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(
            [LlamaDecoderLayer(hidden, num_heads, num_kv_heads, intermediate, i) for i in range(num_layers)]
        )
        self.norm = LlamaRMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

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
    name="llama",
    build=lambda c: LlamaForCausalLM(
        c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=cached,
    declares={
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tied": False,
        "padding_side": "both",
    },
    domain={"d_model": [8, 16], "num_heads": [1, 2, 4]},
)
