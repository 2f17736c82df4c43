WHAT = "The functional SDPA gets dropout_p whatever the mode (line 28): attention weights are dropped in eval, too, so that inference is random."
"""Causal self-attention, moved from softmax and nn.Dropout to the fused scaled_dot_product_attention."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from veriformer.properties import Subject


class SelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.heads, d // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        if attention_mask is not None:
            # a query always sees itself, so that padded ones have something to see
            mask = mask & (attention_mask[:, None, None, :] | torch.eye(t, dtype=torch.bool, device=x.device))
        y = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout
        )
        return self.proj_drop(self.proj(y.transpose(1, 2).reshape(b, t, d)))


subject = Subject(
    kind="self_attention",
    name="self-attention on SDPA",
    build=lambda c: SelfAttention(c.d_model, c.num_heads, c.dropout),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    mask_forms=("padding",),
    declares={"causal": True, "positions": "none"},
)
