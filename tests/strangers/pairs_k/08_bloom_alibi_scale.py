"""A small BLOOM: ALiBi through baddbmm, fused queries, keys and values."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The scores are scaled after the ALiBi bias was added, which divides every slope by sqrt(d_head)."
CAUSE = "The ALiBi bias is multiplied by 1/sqrt(d_head): it is added before the scores are scaled, so slopes are too small."


def alibi_slopes(n):
    def power_of_two(m):
        start = 2 ** (-8 / m)
        return [start ** (i + 1) for i in range(m)]

    if math.log2(n).is_integer():
        return power_of_two(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_two(closest) + power_of_two(2 * closest)[0::2][: n - closest]


class BloomAttention(nn.Module):
    def __init__(self, hidden_size, n_head):
        super().__init__()
        self.num_heads, self.head_dim = n_head, hidden_size // n_head
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def scores(self, alibi, q, k):
        raise NotImplementedError

    def forward(self, x, alibi, seen):
        B, T, D = x.shape
        fused = self.query_key_value(x).view(B, T, self.num_heads, 3, self.head_dim)
        q, k, v = (t.transpose(1, 2).reshape(B * self.num_heads, T, self.head_dim) for t in fused.unbind(3))
        scores = self.scores(alibi.repeat(B, 1, 1), q, k.transpose(1, 2)).view(B, self.num_heads, T, T)
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1).view(B * self.num_heads, T, T)
        context = torch.bmm(weights, v).view(B, self.num_heads, T, self.head_dim)
        return self.dense(context.transpose(1, 2).reshape(B, T, D))


class BloomAttentionV1(BloomAttention):
    def scores(self, alibi, q, k):
        return torch.baddbmm(alibi, q, k) * (1.0 / math.sqrt(self.head_dim))


class BloomAttentionV2(BloomAttention):
    def scores(self, alibi, q, k):
        return torch.baddbmm(alibi, q, k, beta=1.0, alpha=1.0 / math.sqrt(self.head_dim))


class BloomBlock(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.self_attention = attention(c.d_model, c.num_heads)
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, alibi, seen):
        x = x + self.self_attention(self.input_layernorm(x), alibi, seen)
        h = F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x)), approximate="tanh")
        return x + self.dense_4h_to_h(h)


class Bloom(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.word_embeddings_layernorm = nn.LayerNorm(c.d_model)
        self.h = nn.ModuleList([BloomBlock(c, attention) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.slopes = alibi_slopes(c.num_heads)

    def forward(self, ids, attention_mask=None):
        B, T = ids.shape
        place = torch.arange(T, device=ids.device)
        x = self.word_embeddings_layernorm(self.word_embeddings(ids))
        distance = (place[None, :] - place[:, None]).double()
        slopes = torch.tensor(self.slopes, dtype=torch.float64, device=ids.device)
        alibi = (slopes[:, None, None] * distance).to(x.dtype)
        seen = (place[None, :] <= place[:, None])[None, None]
        if attention_mask is not None:
            seen = seen & attention_mask.bool()[:, None, None, :]
        for block in self.h:
            x = block(x, alibi, seen)
        return self.lm_head(self.ln_f(x))


def subject(attention):
    return Subject(
        kind="decoder",
        name="small BLOOM",
        build=lambda c: Bloom(c, attention),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={
            "causal": True,
            "positions": "alibi",
            "norm": "layer",
            "norm_placement": "pre",
            "activation": "gelu_tanh",
            "padding_side": "both",
        },
    )


right = subject(BloomAttentionV2)
wrong = subject(BloomAttentionV1)
