"""BLOOM: ALiBi as a tensor [B * H, 1, T] that baddbmm adds while it multiplies queries and keys."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


def get_slopes(n):
    """The published slopes, those of numbers that are no power of two included."""

    def power_of_two(m):
        start = 2 ** (-(2 ** -(math.log2(m) - 3)))
        return [start ** (i + 1) for i in range(m)]

    if math.log2(n).is_integer():
        return power_of_two(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_two(closest) + power_of_two(2 * closest)[0::2][: n - closest]


def build_alibi_tensor(mask, num_heads, dtype, spread):
    """`spread(slopes, batch)` gives one slope for each of the B * H rows of the fused batch."""
    batch, length = mask.shape
    slopes = torch.tensor(get_slopes(num_heads), dtype=torch.float64, device=mask.device)
    arange = ((mask.long().cumsum(-1) - 1) * mask).double()  # [B, T]
    rows = arange[:, None, :].expand(batch, num_heads, length).reshape(batch * num_heads, 1, length)
    return (spread(slopes, batch)[:, None, None] * rows).to(dtype)


class BloomAttention(nn.Module):
    def __init__(self, hidden_size, n_head):
        super().__init__()
        self.num_heads, self.head_dim = n_head, hidden_size // n_head
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden, alibi, hidden_keys):
        b, t, d = hidden.shape
        fused = self.query_key_value(hidden).view(b, t, self.num_heads, 3, self.head_dim)
        q, k, v = (fused[..., i, :].transpose(1, 2).reshape(b * self.num_heads, t, self.head_dim) for i in range(3))
        scores = alibi.expand(-1, t, -1).baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=self.head_dim**-0.5)
        scores = scores.view(b, self.num_heads, t, t).masked_fill(hidden_keys, torch.finfo(scores.dtype).min)
        probs = scores.softmax(-1).view(b * self.num_heads, t, t)
        context = torch.bmm(probs, v).view(b, self.num_heads, t, self.head_dim)
        return self.dense(context.transpose(1, 2).reshape(b, t, d))


class BloomBlock(nn.Module):
    def __init__(self, hidden_size, n_head, inner):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.self_attention = BloomAttention(hidden_size, n_head)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(hidden_size, inner), nn.Linear(inner, hidden_size)

    def forward(self, hidden, alibi, hidden_keys):
        hidden = hidden + self.self_attention(self.input_layernorm(hidden), alibi, hidden_keys)
        inner = nn.functional.gelu(self.dense_h_to_4h(self.post_attention_layernorm(hidden)), approximate="tanh")
        return hidden + self.dense_4h_to_h(inner)


class Bloom(nn.Module):
    def __init__(self, c, spread):
        super().__init__()
        self.n_head, self.spread = c.num_heads, spread
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.h = nn.ModuleList([BloomBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        mask = attention_mask.bool()
        hidden = self.word_embeddings(input_ids)
        alibi = build_alibi_tensor(mask, self.n_head, hidden.dtype, self.spread)
        eye = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
        hidden_keys = ~((torch.ones_like(eye).tril() & mask[:, None, None]) | eye)
        for block in self.h:
            hidden = block(hidden, alibi, hidden_keys)
        return self.ln_f(hidden) @ self.word_embeddings.weight.t()


def subject(name, spread):
    return Subject(
        kind="decoder",
        name=name,
        build=lambda c: Bloom(c, spread),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": True, "positions": "alibi", "norm": "layer", "norm_placement": "pre", "final_norm": True,
                  "activation": "gelu_tanh", "tied": True},
    )


right = subject("bloom", lambda slopes, batch: slopes.repeat(batch))
wrong = subject("bloom, interleaved", lambda slopes, batch: slopes.repeat_interleave(batch))

WHAT = "Slopes are spread over the fused B*H axis with repeat_interleave(B) where the axis runs over samples first and heads second (repeat(B))."
CAUSE = (
    "In build_alibi_tensor row b*H+h gets the slope of head (b*H+h)//B: with more than one sample the slopes of the heads depend "
    "on the place in the batch, so a sample gives other outputs in a batch than alone."
)
