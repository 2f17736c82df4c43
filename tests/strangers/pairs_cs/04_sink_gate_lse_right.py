"""Attention sinks without an extra column: softmax over [scores, sink] is softmax(scores) * sigmoid(lse(scores) - sink)."""
import torch
from torch import nn

from veriformer.properties import Subject


class SinkAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.d = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.sinks = nn.Parameter(torch.randn(heads))

    def attend(self, x, attention_mask):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, self.d).permute(2, 0, 3, 1, 4)
        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        scores = q @ k.transpose(-1, -2) * self.d**-0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        lse = torch.logsumexp(scores, dim=-1, keepdim=True)
        gate = torch.sigmoid(lse - self.sinks[None, :, None, None])
        return scores.softmax(-1) * gate, v

    def forward(self, x, attention_mask=None):
        weights, v = self.attend(x, attention_mask)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


subject = Subject(
    kind="self_attention",
    name="attention with learned sinks",
    build=lambda c: SinkAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "sink": True, "positions": "none"},
)
