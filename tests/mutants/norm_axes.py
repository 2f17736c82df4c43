"""Faults of norms over another axis than the channels, inside an attention and inside a block."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put_class


class Attending(nn.Module):
    """Attention of normalised queries and keys `[B, T, H, K]`, over all positions."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.heads = c.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model) for _ in range(4))

    def unit(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q, self.k, self.v))
        scores = torch.einsum("bthd,bshd->bhts", self.unit(q), self.unit(k)) * q.shape[-1] ** -0.5
        return self.o(torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2))


class Block(nn.Module):
    """A pre-LN block whose first norm is written out."""

    def __init__(self, c: DrawnConfig, attending: type[Attending]) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attending = attending(c)
        self.wide, self.narrow = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def inner(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attending(self.before(x))
        out: Tensor = x + self.narrow(F.gelu(self.inner(self.wide(self.behind(x)))))
        return out


def _block(attending: type[Attending] = Attending, block: type[Block] = Block) -> Subject:
    made, parts = put_class(block), put_class(attending)
    return Subject(
        kind="layer", build=lambda c: made(c, parts), forward=lambda m, x: m(x), mask_forms=(),
        declares={"norm": "layer", "norm_placement": "pre", "query_key_norm": True},
    )  # fmt: skip


@fault(
    "norm-over-heads",
    "Queries and keys are normalised over the heads, not over a head's channels",
    killed_by=("anatomy.norm",),
    cause="over heads",
)
def over_heads() -> Subject:
    class Heads(Attending):
        def unit(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-2, keepdim=True) + 1e-6)

    return _block(Heads)


@fault(
    "norm-over-positions",
    "Queries and keys are normalised over the positions",
    killed_by=("anatomy.norm",),
    cause="over positions",
)
def over_positions() -> Subject:
    class Positions(Attending):
        def unit(self, x: Tensor) -> Tensor:
            return F.normalize(x)

    return _block(Positions)


@fault(
    "norm-over-both",
    "A norm inside a feed-forward network takes positions and channels together",
    killed_by=("anatomy.norm",),
    cause="over positions and channels",
)
def over_both() -> Subject:
    class Both(Block):
        def inner(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, x.shape[1:])

    return _block(block=Both)
