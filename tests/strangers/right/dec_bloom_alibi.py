"""BLOOM style decoder: ALiBi, QKV interleaved per head ([H, 3, d]), LayerNorm behind the embedding, baddbmm.

Unusual: the ALiBi term is `slope * key position` alone. Within a row the query's position is a constant, which softmax
does not see, so this equals -slope * distance. Positions are counted over real tokens, so padding may stand on either side.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def get_slopes(n):
    def power_of_two(k):
        start = 2.0 ** (-(2.0 ** -(math.log2(k) - 3)))
        return [start * start**i for i in range(k)]

    closest = 2 ** math.floor(math.log2(n))
    slopes = power_of_two(closest)
    if closest != n:
        slopes += power_of_two(2 * closest)[0::2][: n - closest]
    return slopes


def build_alibi_tensor(attention_mask, slopes, dtype):
    positions = ((attention_mask.long().cumsum(dim=-1) - 1) * attention_mask)[:, None, :]
    alibi = slopes.to(dtype)[None, :, None] * positions.to(dtype)
    return alibi.reshape(-1, 1, attention_mask.shape[1])  # [B * H, 1, T]


class BloomAttention(nn.Module):
    def __init__(self, hidden_size, n_head, pdrop):
        super().__init__()
        self.num_heads = n_head
        self.head_dim = hidden_size // n_head
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_dropout = nn.Dropout(pdrop)
        self.hidden_dropout = pdrop

    def forward(self, hidden_states, residual, alibi, blocked):
        b, t, _ = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(b, t, self.num_heads, 3, self.head_dim)
        query, key, value = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
        query = query.transpose(1, 2).reshape(b * self.num_heads, t, self.head_dim)
        key = key.permute(0, 2, 3, 1).reshape(b * self.num_heads, self.head_dim, t)
        value = value.transpose(1, 2).reshape(b * self.num_heads, t, self.head_dim)
        scores = torch.baddbmm(alibi, query, key, beta=1.0, alpha=self.inv_norm_factor)
        scores = scores.view(b, self.num_heads, t, t).masked_fill(blocked, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1).masked_fill(blocked, 0.0)
        probs = self.attention_dropout(probs).view(b * self.num_heads, t, t)
        context = torch.bmm(probs, value).view(b, self.num_heads, t, self.head_dim)
        context = context.permute(0, 2, 1, 3).reshape(b, t, -1)
        return residual + F.dropout(self.dense(context), p=self.hidden_dropout, training=self.training)


class BloomMLP(nn.Module):
    def __init__(self, hidden_size, inner, pdrop):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden_size, inner)
        self.dense_4h_to_h = nn.Linear(inner, hidden_size)
        self.hidden_dropout = pdrop

    def forward(self, x, residual):
        x = self.dense_h_to_4h(x)
        x = x * 0.5 * (1.0 + torch.tanh(0.79788456080286535588 * x * (1 + 0.044715 * x * x)))
        return residual + F.dropout(self.dense_4h_to_h(x), p=self.hidden_dropout, training=self.training)


class BloomBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(c.d_model)
        self.self_attention = BloomAttention(c.d_model, c.num_heads, c.dropout)
        self.post_attention_layernorm = nn.LayerNorm(c.d_model)
        self.mlp = BloomMLP(c.d_model, c.d_ff, c.dropout)

    def forward(self, x, alibi, blocked):
        x = self.self_attention(self.input_layernorm(x), x, alibi, blocked)
        return self.mlp(self.post_attention_layernorm(x), x)


class Bloom(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.word_embeddings_layernorm = nn.LayerNorm(c.d_model)
        self.h = nn.ModuleList([BloomBlock(c) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.slopes = get_slopes(c.num_heads)

    def forward(self, input_ids, attention_mask=None):
        b, t = input_ids.shape
        if attention_mask is None:
            attention_mask = input_ids.new_ones((b, t), dtype=torch.bool)
        x = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        slopes = torch.tensor(self.slopes, dtype=torch.float64, device=x.device)
        alibi = build_alibi_tensor(attention_mask, slopes, x.dtype)
        ahead = torch.arange(t, device=x.device)
        blocked = (ahead[:, None] < ahead[None, :])[None, None] | ~attention_mask[:, None, None, :]
        for block in self.h:
            x = block(x, alibi, blocked)
        return F.linear(self.ln_f(x), self.word_embeddings.weight)


COMMON = dict(
    kind="decoder",
    build=Bloom,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "positions": "alibi",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": False,
        "tied": True,
        "structure": "other",
    },
)
