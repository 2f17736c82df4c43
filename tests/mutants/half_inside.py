"""Faults of a model that rounds to 16 bits on the way: in float32, or where its positions are counted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put_class


class Decoder(nn.Module):
    """A small decoder whose scores, statistics and positions a fault may round."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(c.vocab_size, c.d_model), nn.Linear(c.d_model, c.vocab_size)
        self.q, self.k, self.v = (nn.Linear(c.d_model, c.d_model) for _ in range(3))

    def places(self, length: int, like: Tensor) -> Tensor:
        return torch.arange(length, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * q.shape[-1] ** -0.5

    def normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        places = self.places(tokens.shape[1], x)
        steps = torch.arange(x.shape[-1], dtype=places.dtype, device=x.device) / x.shape[-1]
        x = x + torch.sin(places[:, None] * 0.01**steps).to(x.dtype)
        h = self.normed(x)
        scores = self.scores(self.q(h), self.k(h))
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        x = x + scores.masked_fill(later, -torch.inf).softmax(-1) @ self.v(h)
        out: Tensor = self.head(self.normed(x))
        return out


def _decoder(wrong: type[Decoder]) -> Subject:
    made = put_class(wrong)
    return Subject(
        kind="decoder", build=lambda c: made(c), forward=lambda m, tokens: m(tokens), mask_forms=(),
        declares={"positions": "other"},
    )  # fmt: skip


@fault(
    "inside-positions",
    "Positions are counted in bfloat16: beyond 256 neighbours are one number",
    killed_by=("numerics.precision-ladder",),
    cause="16 bits on the way: arange in bfloat16",
)
def counted() -> Subject:
    class Counted(Decoder):
        def places(self, length: int, like: Tensor) -> Tensor:
            return torch.arange(length, dtype=torch.bfloat16, device=like.device).to(like.dtype)

    return _decoder(Counted)


@fault(
    "inside-scores",
    "The product of queries and keys is made in bfloat16 and widened for the softmax",
    killed_by=("numerics.precision-ladder",),
    cause="16 bits on the way",
)
def multiplied() -> Subject:
    class Multiplied(Decoder):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return super().scores(q.bfloat16(), k.bfloat16()).to(q.dtype)

    return _decoder(Multiplied)


@fault(
    "inside-statistics",
    "The mean of squares of a norm is taken in float16",
    killed_by=("numerics.precision-ladder",),
    cause="16 bits on the way",
)
def averaged() -> Subject:
    class Averaged(Decoder):
        def normed(self, x: Tensor) -> Tensor:
            size = x.half().square().mean(-1, keepdim=True)
            return x * torch.rsqrt(size.to(x.dtype) + 1e-6)

    return _decoder(Averaged)


@fault(
    "counted-in-its-dtype",
    "Positions are counted in the dtype of the model: in bfloat16 neighbours beyond 256 are one number",
    killed_by=("numerics.precision-ladder",),
    cause="positions are counted in the dtype of the model",
)
def counted_in_its_dtype() -> Subject:
    class Counted(Decoder):
        def places(self, length: int, like: Tensor) -> Tensor:
            return torch.ones(length, dtype=like.dtype, device=like.device).cumsum(0) - 1

    return _decoder(Counted)
