WHAT = "Cross-attention with capped scores: the cap is put on behind the mask (`CAP * tanh(scores / CAP)` after masked_fill), which turns minus infinity into -CAP: hidden memory keeps weight."
"""Cross-attention with soft-capped scores as in Gemma 2; grouped keys and values."""
import torch
from torch import nn

from veriformer.properties import Subject

CAP = 4.0


class CappedCrossAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h, self.g, self.k = c.num_heads, c.num_key_value_heads, c.d_model // c.num_heads
        self.to_q = nn.Linear(c.d_model, self.h * self.k, bias=False)
        self.to_kv = nn.Linear(c.d_model, 2 * self.g * self.k, bias=False)
        self.to_out = nn.Linear(self.h * self.k, c.d_model, bias=False)

    def forward(self, x, memory, memory_mask=None):
        q = self.to_q(x).unflatten(-1, (self.g, self.h // self.g, self.k))
        k, v = self.to_kv(memory).unflatten(-1, (2, self.g, self.k)).unbind(2)
        scores = torch.einsum("btgrk,bsgk->bgrts", q, k).mul(self.k**-0.5)
        if memory_mask is not None:
            scores = scores.masked_fill(~memory_mask[:, None, None, None, :], -torch.inf)
        scores = CAP * torch.tanh(scores / CAP)
        weights = torch.softmax(scores, -1)
        return self.to_out(torch.einsum("bgrts,bsgk->btgrk", weights, v).flatten(2))


subject = Subject(
    kind="cross_attention",
    name="capped cross-attention",
    build=CappedCrossAttention,
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"soft_cap": CAP, "grouped_queries": True, "bias": False, "empty_row": "nan"},
)
