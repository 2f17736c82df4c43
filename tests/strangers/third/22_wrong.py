import math

import torch
from torch import nn


class T5RelativeAttention(nn.Module):
    """Self attention of the T5 encoder: no scaling, bucketed relative position bias."""

    def __init__(self, d_model=64, d_kv=16, num_heads=4, num_buckets=32, max_distance=128, bidirectional=True):
        super().__init__()
        self.n_heads = num_heads
        self.d_kv = d_kv
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        inner = num_heads * d_kv
        self.q = nn.Linear(d_model, inner, bias=False)
        self.k = nn.Linear(d_model, inner, bias=False)
        self.v = nn.Linear(d_model, inner, bias=False)
        self.o = nn.Linear(inner, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)
        nn.init.normal_(self.q.weight, std=(d_model * d_kv) ** -0.5)
        nn.init.normal_(self.k.weight, std=d_model ** -0.5)
        nn.init.normal_(self.v.weight, std=d_model ** -0.5)

    @staticmethod
    def _relative_position_bucket(relative_position, bidirectional=True, num_buckets=32, max_distance=128):
        buckets = 0
        if bidirectional:
            num_buckets //= 2
            buckets = buckets + (relative_position > 0).to(torch.long) * num_buckets
            relative_position = torch.abs(relative_position)
        else:
            relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))

        # half of the buckets for exact increments, the other half log-spaced up to max_distance
        max_exact = num_buckets // 2
        is_small = relative_position < max_exact
        large = max_exact + (
            torch.log(relative_position.float().clamp(min=1) / max_exact)
            / math.log(max_distance / max_exact)
            * (num_buckets - max_exact)
        ).to(torch.long)
        large = torch.max(large, torch.full_like(large, num_buckets - 1))
        return buckets + torch.where(is_small, relative_position, large)

    def compute_bias(self, q_len, k_len, device=None):
        context = torch.arange(q_len, dtype=torch.long, device=device)[:, None]
        memory = torch.arange(k_len, dtype=torch.long, device=device)[None, :]
        bucket = self._relative_position_bucket(
            memory - context, self.bidirectional, self.num_buckets, self.max_distance
        )
        return self.relative_attention_bias(bucket).permute(2, 0, 1).unsqueeze(0)

    def forward(self, hidden_states, mask=None):
        b, n, _ = hidden_states.shape

        def heads(t):
            return t.view(b, n, self.n_heads, self.d_kv).transpose(1, 2)

        q, k, v = heads(self.q(hidden_states)), heads(self.k(hidden_states)), heads(self.v(hidden_states))
        scores = torch.matmul(q, k.transpose(3, 2))
        scores = scores + self.compute_bias(n, n, hidden_states.device)
        if mask is not None:
            scores = scores + (1.0 - mask[:, None, None, :].to(scores)) * torch.finfo(scores.dtype).min
        weights = scores.float().softmax(dim=-1).type_as(scores)
        out = torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, n, -1)
        return self.o(out)
