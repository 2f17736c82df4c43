"""Faults of routers: how the experts of a token are weighed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put


class _Experts(nn.Module):
    """Four experts, two of them for each token; `weigh(probabilities, kept)` gives the weights, `[B, T, 4]`."""

    def __init__(self, width: int, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.weigh = nn.Linear(width, 4, bias=False), weigh
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def route(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(-1)
        best = p.topk(2, dim=-1)
        return self.weigh(p, torch.zeros_like(p).scatter(-1, best.indices, best.values))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([F.gelu(expert(x)) for expert in self.experts], dim=-1)
        return (outputs * self.route(x).nan_to_num().reshape(*x.shape[:2], 1, 4)).sum(-1)


def _normalised(p: Tensor, kept: Tensor) -> Tensor:
    return kept / kept.sum(-1, keepdim=True)


def _network(weigh: Callable[[Tensor, Tensor], Tensor], *, norm_topk_prob: bool = True) -> Subject:
    return Subject(
        kind="feed_forward",
        build=lambda c: _Experts(c.d_model, weigh),
        forward=lambda m, x: m(x),
        router=lambda m, x: m.route(x),
        declares={"norm_topk_prob": norm_topk_prob, "activation": "other", "structure": "other"},
    )


@fault(
    "ME03",
    "The probabilities of the chosen experts are not divided by their sum",
    killed_by=("router.normalised",),
    cause="not divided by their sum",
)
def not_normalised() -> Subject:
    return _network(put(lambda p, kept: kept, instead_of=_normalised))


@fault(
    "router-divided",
    "The probabilities of the chosen experts are divided by their sum, where they are to stay as they are",
    killed_by=("router.normalised",),
    cause="divided by their sum",
)
def divided() -> Subject:
    return _network(put(_normalised, instead_of=lambda p, kept: kept), norm_topk_prob=False)


@fault(
    "router-negative",
    "A balancing bias is subtracted from the weights, not from the scores that choose",
    killed_by=("router.normalised",),
    cause="",
)
def negative() -> Subject:
    return _network(
        put(lambda p, kept: _normalised(p, kept) - torch.tensor([0.5, 0.0, 0.0, -0.5]), instead_of=_normalised)
    )


@fault(
    "router-nan",
    "Weights are divided by the sum of those above a threshold, which may be none",
    killed_by=("router.normalised",),
    cause="",
)
def nothing_above() -> Subject:
    def above(p: Tensor, kept: Tensor) -> Tensor:
        chosen = kept * (kept > 0.45)
        return chosen / chosen.sum(-1, keepdim=True)

    return _network(put(above, instead_of=_normalised))


@fault(
    "router-flat",
    "The router gives one row for each token of all samples, `[B T, E]`",
    killed_by=("router.normalised",),
    cause="",
)
def flattened() -> Subject:
    return _network(put(lambda p, kept: _normalised(p, kept).flatten(0, 1), instead_of=_normalised))


class _Dispatched(_Experts):
    """Each expert is called on its own tokens, and adds to what the others gave."""

    def put(self, output: Tensor, rows: Tensor, change: Tensor) -> Tensor:
        return output.index_add(0, rows, change)

    def forward(self, x: Tensor) -> Tensor:
        flat, weights = x.flatten(0, 1), self.route(x).flatten(0, 1)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (weights[:, number] > 0).nonzero().flatten()
            output = self.put(output, rows, weights[rows, number, None] * expert(flat[rows]))
        return output.view_as(x)


@fault(
    "router-overwritten",
    "Of a token's two experts the later one overwrites the other, in a block that is no textbook's",
    killed_by=("router.weights",),
    cause="rows that were written before",
)
def overwritten() -> Subject:
    class Put(_Dispatched):
        def put(self, output: Tensor, rows: Tensor, change: Tensor) -> Tensor:
            return output.index_copy(0, rows, change)

    cls = put(Put, instead_of=_Dispatched)
    return Subject(
        kind="feed_forward",
        build=lambda c: cls(c.d_model, _normalised),
        forward=lambda m, x: m(x),
        router=lambda m, x: m.route(x),
        declares={"norm_topk_prob": True, "activation": "other", "structure": "other"},
    )
