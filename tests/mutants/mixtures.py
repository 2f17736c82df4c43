"""Faults of how a whole model weighs its experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.feedforward import FeedForward
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put_class
from veriformer.tests.mutants.parts import SelfAttention


class Mixture(nn.Module):
    """Two of four experts for each token, their weights divided by their sum."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(FeedForward(width, inner, functional.gelu) for _ in range(4))

    def weights(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        kept, chosen = scores.softmax(-1).topk(2, dim=-1)
        return kept / kept.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.weights(self.router(x))
        gates = torch.zeros(*x.shape[:-1], 4, dtype=x.dtype, device=x.device).scatter(-1, chosen, weights)
        return torch.stack([gates[..., e, None] * expert(x) for e, expert in enumerate(self.experts)]).sum(0)


class Layer(nn.Module):
    """A pre-LN layer whose feed-forward network is a mixture."""

    def __init__(self, c: DrawnConfig, mixture: type[Mixture]) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attention, self.mixture = SelfAttention(c), mixture(c.d_model, c.d_ff)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        mixed: Tensor = x + self.mixture(self.behind(x))
        return mixed


def _layer(wrong: type[Mixture]) -> Subject:
    mixture = put_class(wrong)
    return Subject(kind="layer", build=lambda c: Layer(c, mixture), declares={"norm_placement": "pre"})


@fault(
    "experts-first-weight",
    "Both experts of a token are weighted by the weight of its first",
    killed_by=("router.weights",),
    cause="by the weight of its first",
)
def weighted_by_the_first() -> Subject:
    class First(Mixture):
        def weights(self, scores: Tensor) -> tuple[Tensor, Tensor]:
            weights, chosen = super().weights(scores)
            return weights[..., :1].expand_as(weights), chosen

    return _layer(First)


@fault(
    "experts-turned-weights",
    "The weights of the two experts are given to one another",
    killed_by=("router.weights",),
    cause="given to other experts",
)
def weights_of_one_another() -> Subject:
    class Turned(Mixture):
        def weights(self, scores: Tensor) -> tuple[Tensor, Tensor]:
            weights, chosen = super().weights(scores)
            return weights.flip(-1), chosen

    return _layer(Turned)


class Dispatched(Mixture):
    """The same, each expert called on its tokens alone, what they give added up."""

    def gather(self, out: Tensor, rows: Tensor, part: Tensor) -> Tensor:
        return out.index_add(0, rows, part)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.weights(self.router(tokens))
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out = self.gather(out, rows, weights[rows, slots, None] * expert(tokens[rows]))
        return out.view_as(x)


@fault(
    "experts-overwritten",
    "The experts of a token are written over one another, where what they give is to be added",
    killed_by=("router.weights",),
    cause="overwrite one another",
)
def written_over() -> Subject:
    class Over(Dispatched):
        def gather(self, out: Tensor, rows: Tensor, part: Tensor) -> Tensor:
            return out.index_put((rows,), part)

    return _layer(Over)


@fault(
    "experts-scattered",
    "The second choices of all tokens are scattered over the first ones",
    killed_by=("router.weights",),
    cause="overwrite one another",
)
def scattered() -> Subject:
    class Scattered(Dispatched):
        def gather(self, out: Tensor, rows: Tensor, part: Tensor) -> Tensor:
            return out.scatter(0, rows[:, None].expand_as(part), part)

    return _layer(Scattered)
