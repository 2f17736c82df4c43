"""BLOOM: ALiBi instead of positions, a norm behind the embeddings, queries, keys and values in one matrix."""

import math
from typing import Optional, Tuple

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def build_alibi_tensor(attention_mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """The bias of every key, [batch, num_heads, 1, key_length]; softmax does not see the query's share of it."""
    closest_power_of_2 = 2 ** math.floor(math.log2(num_heads))
    base = 2 ** (-(2 ** -(math.log2(closest_power_of_2) - 3)))
    powers = torch.arange(1, 1 + closest_power_of_2, device=attention_mask.device, dtype=torch.float64)
    slopes = torch.pow(torch.full_like(powers, base), powers)

    if closest_power_of_2 != num_heads:
        extra_base = 2 ** (-(2 ** -(math.log2(2 * closest_power_of_2) - 3)))
        num_remaining_heads = min(closest_power_of_2, num_heads - closest_power_of_2)
        extra_powers = torch.arange(1, 1 + num_remaining_heads, device=attention_mask.device, dtype=torch.float64)
        slopes = torch.cat([slopes, torch.pow(torch.full_like(extra_powers, extra_base), extra_powers)], dim=0)

    arange_tensor = ((attention_mask.cumsum(dim=-1) - 1) * attention_mask)[:, None, None, :]
    return (slopes[None, :, None, None] * arange_tensor).to(dtype)


class BloomAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=True)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_dropout = nn.Dropout(dropout)

    def _split_heads(self, fused_qkv: torch.Tensor):
        batch_size, seq_length, _ = fused_qkv.shape
        fused_qkv = fused_qkv.view(batch_size, seq_length, self.num_heads, 3, self.head_dim)
        query, key, value = fused_qkv.unbind(dim=3)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def forward(self, hidden_states, alibi, hidden, layer_past=None):
        query, key, value = self._split_heads(self.query_key_value(hidden_states))
        if layer_past is not None:
            key = torch.cat([layer_past[0], key], dim=2)
            value = torch.cat([layer_past[1], value], dim=2)
        scores = alibi + self.inv_norm_factor * torch.matmul(query, key.transpose(-1, -2))
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1, dtype=torch.float64 if scores.dtype == torch.float64 else torch.float32)
        probs = self.attention_dropout(probs.to(value.dtype))
        context = torch.matmul(probs, value).transpose(1, 2).flatten(2)
        return self.dense(context), (key, value)


class BloomMLP(nn.Module):
    def __init__(self, hidden_size: int, inner: int):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden_size, inner)
        self.dense_4h_to_h = nn.Linear(inner, hidden_size)

    def forward(self, x):
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x), approximate="tanh"))


class BloomBlock(nn.Module):
    def __init__(self, hidden_size, num_heads, inner, dropout):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size, eps=1e-5)
        self.self_attention = BloomAttention(hidden_size, num_heads, dropout)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size, eps=1e-5)
        self.mlp = BloomMLP(hidden_size, inner)
        self.hidden_dropout = nn.Dropout(dropout)

    def forward(self, hidden_states, alibi, hidden, layer_past=None):
        attended, present = self.self_attention(self.input_layernorm(hidden_states), alibi, hidden, layer_past)
        hidden_states = hidden_states + self.hidden_dropout(attended)
        fed = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.hidden_dropout(fed), present


class BloomForCausalLM(nn.Module):
    def __init__(self, vocab_size, hidden_size, n_layer, n_head, inner, dropout=0.0):
        super().__init__()
        self.num_heads = n_head
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.word_embeddings_layernorm = nn.LayerNorm(hidden_size, eps=1e-5)
        self.h = nn.ModuleList([BloomBlock(hidden_size, n_head, inner, dropout) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(hidden_size, eps=1e-5)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.apply(self._init_weights)
        self.lm_head.weight = self.word_embeddings.weight

    @staticmethod
    def _init_weights(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()

    def forward(
        self, input_ids, attention_mask=None, past: Optional[Tuple] = None, use_cache: bool = False
    ):
        batch_size, seq_length = input_ids.shape
        past_length = 0 if past is None else past[0][0].shape[2]
        if attention_mask is None:
            attention_mask = torch.ones(batch_size, past_length + seq_length, device=input_ids.device)
        hidden_states = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        alibi = build_alibi_tensor(attention_mask.long(), self.num_heads, hidden_states.dtype)

        future = torch.ones(seq_length, past_length + seq_length, dtype=torch.bool, device=input_ids.device)
        hidden = future.triu(past_length + 1)[None, None] | ~attention_mask.bool()[:, None, None, :]
        presents = ()
        for i, block in enumerate(self.h):
            hidden_states, present = block(hidden_states, alibi, hidden, None if past is None else past[i])
            presents += (present,)
        logits = self.lm_head(self.ln_f(hidden_states))
        return (logits, presents) if use_cache else logits

    @staticmethod
    def reorder_cache(past, beam_idx):
        return tuple(tuple(state.index_select(0, beam_idx) for state in layer) for layer in past)


def cached(model, chunks, attention_mask=None, reorder=None):
    past, length, outputs = None, 0, []
    for number, chunk in enumerate(chunks):
        length += chunk.size(1)
        mask = None if attention_mask is None else attention_mask[:, :length]
        logits, past = model(chunk, mask, past, use_cache=True)
        outputs.append(logits)
        if number == 0 and reorder is not None:
            past = model.reorder_cache(past, reorder)
            attention_mask = None if attention_mask is None else attention_mask.index_select(0, reorder)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="BLOOM",
    build=lambda c: BloomForCausalLM(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.dropout),
    domain={"d_model": (12, 24), "num_heads": (2, 4, 6)},
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    cache=cached,
    declares={
        "causal": True,
        "positions": "alibi",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": False,
        "attention_scale": "1/sqrt(d_head)",
        "tied": True,
        "embedding_scale": False,
        "init": "other",
        "structure": "other",
        "padding_side": "both",
        "beyond_max_len": "works",
        "memory": "quadratic",
    },
)
