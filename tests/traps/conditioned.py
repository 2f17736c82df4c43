"""Right layers that look wrong beside their attention: conditions of the whole, convolutions among the sublayers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.traps import trap

_CALL = lambda m, x, attention_mask=None: m(x, attention_mask)  # noqa: E731


class _Attention(nn.Module):
    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.heads = c.num_heads
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        hidden = ~shown[:, None, None]
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, torch.finfo(q.dtype).min)
        return self.out((scores.softmax(-1).masked_fill(hidden, 0.0) @ v).transpose(1, 2).flatten(2))


def _shown(x: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask


class _Modulated(nn.Module):
    """Shifts, scales and gates of both sublayers are made from the mean of the tokens."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model, elementwise_affine=False) for _ in range(2))
        self.attention = _Attention(c)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(c.d_model, 6 * c.d_model))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        shown = _shown(x, attention_mask)
        mean = x.masked_fill(~shown[..., None], 0.0).sum(1) / shown.sum(1, keepdim=True).clamp(min=1).to(x.dtype)
        shift, scale, gate, shift_too, scale_too, gate_too = self.condition(mean)[:, None].chunk(6, -1)
        x = x + gate * self.attention(self.norms[0](x) * (1 + scale) + shift, shown)
        return x + gate_too * self.down(F.gelu(self.up(self.norms[1](x) * (1 + scale_too) + shift_too)))


@trap(
    "adaln-of-the-stream", "What is added to a pre-LN stream grows with it: its gates are made from the stream's mean"
)
def modulated() -> Subject:
    return Subject(kind="layer", build=_Modulated, forward=_CALL, declares={"causal": False, "norm_placement": "pre"})


class _Convolved(nn.Module):
    """Attention, then a convolution module of which all matrices are kernels."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.first, self.second, self.inner = (nn.LayerNorm(c.d_model) for _ in range(3))
        self.attention = _Attention(c)
        self.expand, self.project = nn.Conv1d(c.d_model, 2 * c.d_model, 1), nn.Conv1d(c.d_model, c.d_model, 1)
        self.depthwise = nn.Conv1d(c.d_model, c.d_model, 5, padding=2, groups=c.d_model)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        shown = _shown(x, attention_mask)
        x = x + self.attention(self.first(x), shown)
        y = F.glu(self.expand(self.second(x).transpose(1, 2)), dim=1).masked_fill(~shown[:, None], 0.0)
        return x + self.project(F.silu(self.inner(self.depthwise(y).transpose(1, 2))).transpose(1, 2)).transpose(1, 2)


@trap("conformer-of-kernels", "No nn.Linear acts beside attention: pointwise convolutions do")
def convolved() -> Subject:
    return Subject(kind="layer", build=_Convolved, forward=_CALL, declares={"causal": False, "positions": "other"})


class _Macaron(nn.Module):
    """Half a feed-forward network before attention and half behind it, each with its norm, and a norm of the whole."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(4))
        self.attention = _Attention(c)
        self.ups = nn.ModuleList(nn.Linear(c.d_model, c.d_ff) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(c.d_ff, c.d_model) for _ in range(2))

    def half(self, x: Tensor, n: int) -> Tensor:
        return self.downs[n](F.silu(self.ups[n](self.norms[2 * n](x))))

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        x = x + self.half(x, 0)
        x = x + self.attention(self.norms[1](x), shown)
        return self.norms[3](x + self.half(x, 1))


class _Macarons(nn.Module):
    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(_Macaron(c) for _ in range(c.num_layers))

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x, shown = self.tokens(tokens), _shown(tokens, attention_mask)
        for block in self.blocks:
            x = block(x, shown)
        return x


@trap("macaron", "A block begins with a norm, as pre-LN does, and ends with one, as post-LN does")
def macarons() -> Subject:
    return Subject(
        kind="encoder", build=_Macarons, forward=_CALL, declares={"causal": False, "positions": "none", "norm": "layer"}
    )


@trap("macaron-layer", "A layer begins with a norm and ends with one, and its stream does not pass the others")
def macaron() -> Subject:
    return Subject(
        kind="layer", build=_Macaron, forward=lambda m, x, attention_mask=None: m(x, _shown(x, attention_mask)),
        declares={"causal": False, "norm": "layer"},
    )  # fmt: skip
