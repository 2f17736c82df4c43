"""BLOOM-like decoder: ALiBi, a LayerNorm behind the embedding, fused QKV, tied head; Hugging Face habits."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class BloomConfig:
    def __init__(self, vocab_size, hidden_size, n_layer, n_head, intermediate_size, hidden_dropout=0.0,
                 attention_dropout=0.0, layer_norm_epsilon=1e-5):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.n_layer = n_layer
        self.n_head = n_head
        self.intermediate_size = intermediate_size
        self.hidden_dropout = hidden_dropout
        self.attention_dropout = attention_dropout
        self.layer_norm_epsilon = layer_norm_epsilon


def get_slopes(n):
    def get_slopes_power_of_2(n):
        ratio = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [ratio**i for i in range(n)]

    if math.log2(n).is_integer():
        return get_slopes_power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return get_slopes_power_of_2(closest) + get_slopes(2 * closest)[0::2][: n - closest]


def build_alibi_tensor(attention_mask, num_heads, dtype):
    """Return [B, H, 1, S]: the slope of a head times the number of the key among the real tokens."""
    slopes = torch.tensor(get_slopes(num_heads), dtype=torch.float64, device=attention_mask.device)
    arange = (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0) * attention_mask.long()
    return (slopes[None, :, None, None] * arange[:, None, None, :]).to(dtype)


class BloomAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.n_head
        self.head_dim = config.hidden_size // config.n_head
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.attention_dropout = nn.Dropout(config.attention_dropout)

    def forward(self, hidden_states, alibi, mask, layer_past=None):
        batch, length, width = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(batch, length, self.num_heads, 3, self.head_dim)
        query, key, value = (fused[..., i, :].transpose(1, 2) for i in range(3))
        if layer_past is not None:
            key = torch.cat([layer_past[0], key], dim=2)
            value = torch.cat([layer_past[1], value], dim=2)
        scores = torch.matmul(query, key.transpose(-1, -2)) * self.inv_norm_factor + alibi
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        probs = self.attention_dropout(F.softmax(scores, dim=-1))
        context = torch.matmul(probs, value).transpose(1, 2).reshape(batch, length, width)
        return self.dense(context), (key, value)


class BloomBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.self_attention = BloomAttention(config)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states, alibi, mask, layer_past=None):
        attended, present = self.self_attention(self.input_layernorm(hidden_states), alibi, mask, layer_past)
        hidden_states = hidden_states + self.dropout(attended)
        inner = F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(hidden_states)), approximate="tanh")
        return hidden_states + self.dropout(self.dense_4h_to_h(inner)), present


class BloomForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.word_embeddings_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.h = nn.ModuleList([BloomBlock(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.word_embeddings.weight

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        past = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        total = past + input_ids.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones(input_ids.shape[0], total, dtype=torch.bool, device=input_ids.device)
        attention_mask = attention_mask.bool()
        hidden_states = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        alibi = build_alibi_tensor(attention_mask, self.config.n_head, hidden_states.dtype)
        rows = torch.arange(past, total, device=input_ids.device)
        causal = rows[:, None] >= torch.arange(total, device=input_ids.device)[None, :]
        mask = causal[None, None] & attention_mask[:, None, None, :]
        presents = []
        for i, block in enumerate(self.h):
            layer_past = None if past_key_values is None else past_key_values[i]
            hidden_states, present = block(hidden_states, alibi, mask, layer_past)
            presents.append(present)
        return self.lm_head(self.ln_f(hidden_states)), presents

    @torch.no_grad()
    def generate(self, input_ids, steps, use_cache):
        past = None
        for _ in range(steps):
            model_input = input_ids if past is None else input_ids[:, -1:]
            logits, presents = self(model_input, past_key_values=past)
            past = presents if use_cache else None
            input_ids = torch.cat([input_ids, logits[:, -1].argmax(-1)[:, None]], dim=1)
        return input_ids


def build(c):
    return BloomForCausalLM(
        BloomConfig(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.dropout, c.dropout)
    )


def cached(model, chunks, attention_mask=None):
    outputs, past, seen = [], None, 0
    for chunk in chunks:
        seen += chunk.shape[1]
        mask = None if attention_mask is None else attention_mask[:, :seen]
        logits, past = model(chunk, attention_mask=mask, past_key_values=past)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="bloom",
    build=build,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
    cache=cached,
    generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    declares={
        "causal": True,
        "positions": "alibi",
        "padding_side": "both",
        "beyond_max_len": "works",
        "norm": "layer",
        "norm_placement": "pre",
        "norm_bias": True,
        "final_norm": True,
        "residual": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": False,
        "tied": True,
        "attention_scale": "1/sqrt(d_head)",
        "embedding_scale": False,
        "shared_layers": False,
        "structure": "other",
        "cached_chunks": True,
        "memory": "quadratic",
    },
)
