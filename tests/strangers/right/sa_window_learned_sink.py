"""gpt-oss style causal self-attention: a window of 4, grouped queries and a learned sink in the softmax of every head.

Unusual: each head has one number that competes with the scores in the softmax and stands for no key, so the weights of a row
sum to less than one. Rotary is left to the model around it.
"""

import torch
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


def sdpa(Q, K, V, S, sm_scale, blocked):
    # Q [b, t, g, m, d]: g key-value heads with m query heads each; K, V [b, t, g, d]; S [g * m]
    n_groups, n_mult = Q.shape[2:4]
    S = S.reshape(1, n_groups, n_mult, 1, 1).expand(Q.shape[0], -1, -1, Q.shape[1], -1)
    QK = torch.einsum("bqgmd,bkgd->bgmqk", Q, K) * sm_scale
    QK = QK.masked_fill(blocked[:, None, None], float("-inf"))  # the sink is finite, no row is empty
    QK = torch.cat([QK, S.to(QK.dtype)], dim=-1)
    W = torch.softmax(QK, dim=-1)[..., :-1]
    return torch.einsum("bgmqk,bkgd->bqgmd", W, V).flatten(2), W.flatten(1, 2)


class AttentionBlock(nn.Module):
    def __init__(self, hidden_size, heads, kv_heads):
        super().__init__()
        self.head_dim = hidden_size // heads
        self.groups, self.mult = kv_heads, heads // kv_heads
        self.sinks = nn.Parameter(torch.randn(heads))
        self.qkv = nn.Linear(hidden_size, self.head_dim * (heads + 2 * kv_heads))
        self.out = nn.Linear(self.head_dim * heads, hidden_size)

    def forward(self, x, attention_mask=None):
        b, t, _ = x.shape
        kv = self.groups * self.head_dim
        q, k, v = self.qkv(x).split([kv * self.mult, kv, kv], dim=-1)
        q = q.view(b, t, self.groups, self.mult, self.head_dim)
        k = k.view(b, t, self.groups, self.head_dim)
        v = v.view(b, t, self.groups, self.head_dim)
        ones = torch.ones(t, t, dtype=torch.bool, device=x.device)
        blocked = (ones.triu(1) | ones.tril(-WINDOW)).expand(b, t, t)
        if attention_mask is not None:
            blocked = blocked | ~attention_mask[:, None, :]
        mixed, w = sdpa(q, k, v, self.sinks, 1 / self.head_dim**0.5, blocked)
        return self.out(mixed), w


COMMON = dict(
    kind="self_attention",
    build=lambda c: AttentionBlock(c.d_model, c.num_heads, c.num_key_value_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask)[0],
    weights=lambda m, x, attention_mask=None: m(x, attention_mask)[1],
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "window": WINDOW,
        "sink": True,
        "positions": "none",
        "padding_side": "both",
        "bias": True,
        "empty_row": "zeros",
        "grouped_queries": True,
    },
)
