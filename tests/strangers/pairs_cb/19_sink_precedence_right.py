"""Streaming self-attention: a window and the first tokens as sinks."""
import torch
from torch import nn

from veriformer.properties import Subject

WINDOW, SINKS = 3, 2


def streaming_mask(length):
    i = torch.arange(length).unsqueeze(1)
    j = torch.arange(length).unsqueeze(0)
    causal, recent, sink = j <= i, i - j < WINDOW, j < SINKS
    return causal & (recent | sink)


class StreamingAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_head = num_heads, d_model // num_heads
        self.W_Q = nn.Linear(d_model, d_model)
        self.W_K = nn.Linear(d_model, d_model)
        self.W_V = nn.Linear(d_model, d_model)
        self.W_O = nn.Linear(d_model, d_model)

    def pattern(self, x):
        B, T, _ = x.shape
        Q = self.W_Q(x).view(B, T, self.num_heads, self.d_head).transpose(1, 2)
        K = self.W_K(x).view(B, T, self.num_heads, self.d_head).transpose(1, 2)
        scores = torch.matmul(Q, K.transpose(2, 3)) / self.d_head**0.5
        return scores.masked_fill(~streaming_mask(T), float("-inf")).softmax(dim=-1)

    def forward(self, x):
        B, T, D = x.shape
        V = self.W_V(x).view(B, T, self.num_heads, self.d_head).transpose(1, 2)
        return self.W_O(torch.matmul(self.pattern(x), V).transpose(1, 2).contiguous().view(B, T, D))


def projections(m):
    return {"q": m.W_Q.weight, "k": m.W_K.weight, "v": m.W_V.weight, "o": m.W_O.weight,
            "q_bias": m.W_Q.bias, "k_bias": m.W_K.bias, "v_bias": m.W_V.bias, "o_bias": m.W_O.bias}


subject = Subject(
    kind="self_attention",
    name="streaming",
    build=lambda c: StreamingAttention(c.d_model, c.num_heads),
    forward=lambda m, x: m(x),
    weights=lambda m, x: m.pattern(x),
    projections=projections,
    declares={"causal": True, "window": WINDOW, "sink_tokens": SINKS, "positions": "none"},
)
