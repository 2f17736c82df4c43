"""Self-attention with a learnt sink as in GPT-OSS, in the form in which fused kernels allow it.

A kernel gives the output without a sink and the log-sum-exp of its scores; the sink then scales the output by
exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink).
"""

import torch
from torch import nn

from veriformer.properties import Subject


def attend_with_lse(q, k, v, allowed, scaling):
    """q [B, H, T, K]; the output and the log of the sum of the exponentials of its scores [B, H, T]."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * scaling
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, v), lse


class SinkAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, num_key_value_heads):
        super().__init__()
        self.num_heads = num_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = hidden_size // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim)
        self.k_proj = nn.Linear(hidden_size, num_key_value_heads * self.head_dim)
        self.v_proj = nn.Linear(hidden_size, num_key_value_heads * self.head_dim)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size)
        self.sinks = nn.Parameter(torch.empty(num_heads))
        nn.init.normal_(self.sinks)

    def split(self, x, heads):
        return x.view(x.shape[0], x.shape[1], heads, self.head_dim).transpose(1, 2)

    def forward(self, x, attention_mask=None):
        B, T, _ = x.shape
        q = self.split(self.q_proj(x), self.num_heads)
        k = self.split(self.k_proj(x), self.num_key_value_heads)
        v = self.split(self.v_proj(x), self.num_key_value_heads)
        repeats = self.num_heads // self.num_key_value_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        y, lse = attend_with_lse(q, k, v, allowed, self.scaling)
        y = y * torch.sigmoid(lse - self.sinks[:, None])[..., None]
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


subject = Subject(
    kind="self_attention",
    name="attention with sinks",
    build=lambda c: SinkAttention(c.d_model, c.num_heads, c.num_key_value_heads),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={"causal": True, "sink": True},
)
