WHAT = "the fused bias-dropout-add drops out the sum with the residual rather than the sublayer's output alone (line 15): in training the stream itself is zeroed and rescaled"
"""A Megatron-style layer: linear maps hand their bias on, and a fused bias-dropout-add closes each sublayer."""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties import Subject


def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, prob: float, training: bool) -> Tensor:
    out = x + bias + residual
    return F.dropout(out, p=prob, training=training)


def bias_gelu(bias: Tensor, y: Tensor) -> Tensor:
    return F.gelu(y + bias)


class LinearSkipBias(nn.Linear):
    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:  # type: ignore[override]
        return F.linear(x, self.weight), self.bias


class ParallelAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = LinearSkipBias(hidden, hidden)

    def forward(self, x: Tensor, mask: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        b, t, d = x.shape
        q, k, v = self.query_key_value(x).view(b, t, self.heads, 3 * (d // self.heads)).transpose(1, 2).chunk(3, dim=-1)
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / (d // self.heads) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        probs = F.dropout(scores.softmax(-1), p=self.dropout, training=self.training)
        return self.dense(torch.einsum("bhts,bhsd->bhtd", probs, v).transpose(1, 2).reshape(b, t, d))


class TransformerLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, ffn: int, dropout: float):
        super().__init__()
        self.hidden_dropout = dropout
        self.input_layernorm = nn.LayerNorm(hidden)
        self.self_attention = ParallelAttention(hidden, heads, dropout)
        self.post_attention_layernorm = nn.LayerNorm(hidden)
        self.dense_h_to_4h = LinearSkipBias(hidden, ffn)
        self.dense_4h_to_h = LinearSkipBias(ffn, hidden)

    def forward(self, hidden: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        out, bias = self.self_attention(self.input_layernorm(hidden), mask)
        hidden = bias_dropout_add(out, bias, hidden, self.hidden_dropout, self.training)
        inner, inner_bias = self.dense_h_to_4h(self.post_attention_layernorm(hidden))
        out, bias = self.dense_4h_to_h(bias_gelu(inner_bias, inner))
        return bias_dropout_add(out, bias, hidden, self.hidden_dropout, self.training)


subject = Subject(
    kind="layer",
    name="TransformerLayer",
    build=lambda c: TransformerLayer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "residual": True,
        "activation": "gelu",
        "bias": True,
    },
)
