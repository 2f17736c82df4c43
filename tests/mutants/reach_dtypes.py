"""Faults that are there in half precision alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put_class
from veriformer.tests.mutants.parts import CausalLayer, SelfAttention, layer, self_attention

_INFLUENCE = "causality.no-future-influence"
_CONTENT = "padding.content-irrelevant"


@fault(
    "half-positions",
    "The mask compares positions in the dtype of the scores, where 256 and 257 are one number of bfloat16",
    killed_by=(_INFLUENCE,),
    cause="it begins with sequences of 258",
)
def positions_of_few_bits() -> Subject:
    class Wrong(CausalLayer):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            scores, at = self.scores(x), torch.arange(x.shape[1]).to(x.dtype)
            scores = scores.masked_fill(at[None] > at[:, None], -torch.inf)
            return x + self.o(self.merge(self.weights(scores, attention_mask) @ self.split(self.values(x))))

    return layer(Wrong, causal=True, positions="none")


@fault(
    "half-soft-mask",
    "In float16 hidden keys get -9, which cannot overflow: their weights of 1e-4 are below one rounding",
    killed_by=(_INFLUENCE,),
    cause="the same case holds in float32",
)
def soft_in_float16() -> Subject:
    class Wrong(CausalLayer):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            hidden = ~self.allowed(x.shape[1])
            scores = self.scores(x).masked_fill(hidden, -9.0 if x.dtype == torch.float16 else -torch.inf)
            return x + self.o(self.merge(self.weights(scores, attention_mask) @ self.split(self.values(x))))

    return layer(Wrong, causal=True, positions="none")


@fault(
    "half-padding",
    "In bfloat16 the padding mask is added as -16, taken over from a kernel that multiplies by log2 e",
    killed_by=(_CONTENT,),
)
def weak_padding_in_bfloat16() -> Subject:
    class Wrong(SelfAttention):
        def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            if mask is None or scores.dtype != torch.bfloat16:
                return super().weights(scores, mask)
            return (scores + -16.0 * (~mask)[:, None, None, :].to(scores.dtype)).softmax(dim=-1)

    return self_attention(Wrong)


class _Padded(nn.Module):
    """Two causal layers whose masks are added as numbers of float32 and brought to the dtype of the scores."""

    def __init__(self, config: DrawnConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SelfAttention(config) for _ in range(2))

    def bias(self, allow: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.where(allow, 0.0, torch.finfo(dtype).min).to(dtype)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        allow = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
        if attention_mask is not None:
            allow = allow & attention_mask[:, None, None, :]
        for part in self.layers:
            weights = (part.scores(x) + self.bias(allow, x.dtype)).softmax(dim=-1)
            x = x + part.o(part.merge(weights @ part.split(part.values(x))))
        return x


@fault(
    "half-mask-constant",
    "The mask's constant is the least number of float32, -inf once it is cast: a query of padding alone is NaN, and in "
    "the next layer everything",
    killed_by=(_CONTENT,),
    cause="the same case holds in float32",
)
def constant_of_float32() -> Subject:
    class Wrong(_Padded):
        def bias(self, allow: Tensor, dtype: torch.dtype) -> Tensor:
            return torch.where(allow, 0.0, torch.finfo(torch.float32).min).to(dtype)

    return Subject(
        kind="layer", build=put_class(Wrong), forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": True, "positions": "none", "padding_side": "both", "stacked": False},
    )  # fmt: skip


@fault(
    "half-window",
    "In half precision a faster kernel is taken, whose causal flag counts from the end of a tile of two queries",
    killed_by=(_INFLUENCE, "causality.no-future-gradient"),
    cause="the same case holds in float32",
)
def tile_in_half_precision() -> Subject:
    class Wrong(CausalLayer):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            allow = self.allowed(x.shape[1])
            if x.dtype in (torch.bfloat16, torch.float16):
                last = torch.arange(x.shape[1]) // 2 * 2 + 1
                allow = torch.arange(x.shape[1])[None] <= last[:, None]
            scores = self.scores(x).masked_fill(~allow, -torch.inf)
            return x + self.o(self.merge(self.weights(scores, attention_mask) @ self.split(self.values(x))))

    return layer(Wrong, causal=True, positions="none")
