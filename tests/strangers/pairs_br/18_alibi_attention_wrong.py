WHAT = "the ALiBi bias is added before the scores are divided by sqrt(d_head), so that the slopes are sqrt(d_head) times too small (line 36)"
"""Causal self-attention with ALiBi (Press et al. 2022)."""
import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


def get_slopes(n):
    def power_of_2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_2(closest) + get_slopes(2 * closest)[0::2][: n - closest]


class ALiBiSelfAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.Wqkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.slopes = get_slopes(num_heads)

    def scores(self, q, k):
        T = q.shape[2]
        position = torch.arange(T, device=q.device)
        distance = (position[None, :] - position[:, None]).to(q.dtype)  # -1 for the token before
        bias = torch.tensor(self.slopes, dtype=q.dtype, device=q.device)[:, None, None] * distance
        raw = torch.einsum("bhtd,bhsd->bhts", q, k)
        return (raw + bias) / math.sqrt(self.head_dim)

    def forward(self, x, attention_mask=None, need_weights=False):
        B, T, D = x.shape
        q, k, v = self.Wqkv(x).reshape(B, T, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        scores = self.scores(q, k)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
        if need_weights:
            return weights
        return self.out(torch.einsum("bhts,bhsd->bthd", weights, v).reshape(B, T, D))


subject = Subject(
    kind="self_attention",
    name="ALiBi attention",
    build=lambda c: ALiBiSelfAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    weights=lambda m, x, attention_mask=None: m(x, attention_mask, need_weights=True),
    declares={"causal": True, "positions": "alibi", "slopes": "interleaved"},
)
