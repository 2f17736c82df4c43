"""Falcon-RW style decoder: ALiBi, one key-value head for all queries (MQA), pre-LN blocks."""

import math
from typing import Optional

import torch
from torch import Tensor, nn

from veriformer.properties import Subject


def build_alibi_slopes(num_heads: int) -> list:
    closest = 2 ** math.floor(math.log2(num_heads))
    base = 2.0 ** (-8.0 / closest)
    slopes = [base ** (i + 1) for i in range(closest)]
    if closest != num_heads:
        extra = 2.0 ** (-4.0 / closest)
        slopes += [extra ** (2 * i + 1) for i in range(num_heads - closest)]
    return slopes


class FalconAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.query_key_value = nn.Linear(hidden_size, hidden_size + 2 * self.head_dim)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.register_buffer("slopes", torch.tensor(build_alibi_slopes(num_heads)), persistent=False)

    def logits(self, query: Tensor, key: Tensor, alibi: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2) * self.inv_norm_factor + alibi

    def forward(self, hidden: Tensor, visible: Tensor) -> Tensor:
        fused = self.query_key_value(hidden)
        query, key, value = fused.split([hidden.shape[-1], self.head_dim, self.head_dim], dim=-1)
        query = query.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        key, value = key[:, None], value[:, None]  # one head, broadcast
        place = torch.arange(hidden.shape[1], device=hidden.device)
        alibi = self.slopes[:, None, None] * (place[None, :] - place[:, None])
        scores = self.logits(query, key, alibi.to(query.dtype))
        probs = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1) * visible
        return self.dense((probs @ value).transpose(1, 2).flatten(2))


class FalconAttentionFolded(FalconAttention):
    def logits(self, query: Tensor, key: Tensor, alibi: Tensor) -> Tensor:
        scores = query @ key.transpose(-1, -2)
        scores = scores + alibi
        return scores * self.inv_norm_factor


class FalconDecoderLayer(nn.Module):
    def __init__(self, attention: type, hidden_size: int, num_heads: int, ffn: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.self_attention = attention(hidden_size, num_heads)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.mlp = nn.Sequential(nn.Linear(hidden_size, ffn), nn.GELU(), nn.Linear(ffn, hidden_size))

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x), visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class FalconForCausalLM(nn.Module):
    def __init__(self, attention: type, c) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.h = nn.ModuleList([FalconDecoderLayer(attention, c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Optional[Tensor] = None) -> Tensor:
        length = input_ids.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask[:, None, None, :].bool()
        x = self.word_embeddings(input_ids)
        for layer in self.h:
            x = layer(x, visible)
        return self.lm_head(self.ln_f(x))


def _falcon(attention: type) -> Subject:
    return Subject(
        kind="decoder",
        name="Falcon-RW",
        build=lambda c: FalconForCausalLM(attention, c),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"positions": "alibi", "norm": "layer", "norm_placement": "pre", "activation": "gelu", "padding_side": "both"},
    )


right = _falcon(FalconAttention)
wrong = _falcon(FalconAttentionFolded)
WHAT = "The ALiBi bias is added before the scores are scaled, so it is divided by sqrt(d_head) as well."
CAUSE = (
    "In the attention's logits the factor 1/sqrt(d_head) is applied to q k^T plus bias instead of to q k^T alone: the effective "
    "slopes are the published ones times 1/sqrt(d_head) and depend on the width of a head."
)
