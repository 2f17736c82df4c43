WHAT = "ALiBi is scaled by 1/sqrt(d_head) together with the scores (beta of baddbmm), so that the slopes are sqrt(d_head) times too small: line 34"
"""BLOOM: ALiBi by baddbmm."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


def get_slopes(n):
    def power_of_two(m):
        start = 2.0 ** (-(2.0 ** -(math.log2(m) - 3)))
        return [start ** (i + 1) for i in range(m)]

    if math.log2(n).is_integer():
        return power_of_two(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_two(closest) + get_slopes(2 * closest)[0::2][: n - closest]


class BloomAttention(nn.Module):
    def __init__(self, hidden_size, n_head):
        super().__init__()
        self.num_heads, self.head_dim = n_head, hidden_size // n_head
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, x, alibi, hidden):
        B, T, C = x.shape
        fused = self.query_key_value(x).view(B, T, self.num_heads, 3, self.head_dim)
        q, k, v = (fused[..., i, :].transpose(1, 2).reshape(B * self.num_heads, T, self.head_dim) for i in range(3))
        scores = torch.baddbmm(alibi, q, k.transpose(1, 2), beta=self.inv_norm_factor, alpha=self.inv_norm_factor)
        scores = scores.view(B, self.num_heads, T, T)
        probs = torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), dim=-1)
        context = torch.bmm(probs.view(B * self.num_heads, T, T), v)
        context = context.view(B, self.num_heads, T, self.head_dim).transpose(1, 2)
        return self.dense(context.reshape(B, T, C))


class BloomBlock(nn.Module):
    def __init__(self, hidden_size, n_head, inner):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.self_attention = BloomAttention(hidden_size, n_head)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.mlp = nn.Sequential(nn.Linear(hidden_size, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, hidden_size))

    def forward(self, x, alibi, hidden):
        x = x + self.self_attention(self.input_layernorm(x), alibi, hidden)
        return x + self.mlp(self.post_attention_layernorm(x))


class Bloom(nn.Module):
    def __init__(self, vocab, hidden_size, n_head, n_layer, inner):
        super().__init__()
        self.n_head = n_head
        self.word_embeddings = nn.Embedding(vocab, hidden_size)
        self.h = nn.ModuleList([BloomBlock(hidden_size, n_head, inner) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab, bias=False)
        self.lm_head.weight = self.word_embeddings.weight

    def build_alibi(self, batch, length, like):
        slopes = torch.tensor(get_slopes(self.n_head), dtype=like.dtype, device=like.device)
        t = torch.arange(length, device=like.device)
        distance = (t[None, :] - t[:, None]).to(like.dtype)
        return (slopes[:, None, None] * distance).repeat(batch, 1, 1)

    def forward(self, input_ids, attention_mask=None):
        x = self.word_embeddings(input_ids)
        B, T, _ = x.shape
        alibi = self.build_alibi(B, T, x)
        hidden = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1).expand(B, 1, T, T)
        if attention_mask is not None:
            hidden = hidden | ~attention_mask.bool()[:, None, None, :]
        for block in self.h:
            x = block(x, alibi, hidden)
        return self.lm_head(self.ln_f(x))


subject = Subject(
    kind="decoder",
    name="Bloom",
    build=lambda c: Bloom(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": True,
        "positions": "alibi",
        "slopes": "interleaved",
        "attention_scale": "1/sqrt(d_head)",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "tied": True,
        "bias": True,
        "output_bias": False,
        "padding_side": "both",
    },
)
