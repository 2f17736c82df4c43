"""Convolutional self-attention for time series (Li et al. 2019): queries and keys see the shape of the recent past."""
import torch
from torch import Tensor, nn
from veriformer.properties import Subject


class CausalConv(nn.Conv1d):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__(channels, channels, width, padding=width - 1)
        self.extra = width - 1

    def forward(self, series: Tensor) -> Tensor:  # [B, T, D]
        length = series.shape[1]
        out = super().forward(series.transpose(1, 2))  # T + extra steps: padded on both sides
        return out[..., -length:].transpose(1, 2)


class ConvAttention(nn.Module):
    def __init__(self, d_model: int, n_heads: int, width: int = 3) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.query, self.key = CausalConv(d_model, width), CausalConv(d_model, width)
        self.value, self.out = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, series: Tensor) -> Tensor:
        batch, length, d_model = series.shape
        q, k, v = (
            part(series).reshape(batch, length, self.n_heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        later = torch.ones(length, length, dtype=torch.bool, device=series.device).triu(1)
        scores = torch.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.out(torch.einsum("bhts,bhsk->bthk", weights, v).reshape(batch, length, d_model))


subject = Subject(
    kind="self_attention",
    name="convolutional attention",
    build=lambda c: ConvAttention(c.d_model, c.num_heads),
    forward=lambda m, x: m(x),
    declares={"causal": True, "positions": "other"},
)

WHAT = (
    'Line 15: of the convolution, padded on both sides, the last steps are kept and not the first, so that queries and keys of step t are made of t .. t + 2.'
)
