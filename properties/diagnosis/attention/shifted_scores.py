"""Scores that are made of another position than their query's and their key's: a shift of relative positions, say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream
from veriformer.properties.engine.violations import Violation

_LENGTH = 6
_LEAST = 1e-6  # of the largest gradient


class _Scores(TorchFunctionMode):
    """Keeps the input of the first softmax over as many keys as queries.

    Attributes:
        first: `[..., T, T]`; None before it is seen.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.first: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.first is None and getattr(func, "__name__", "") == "softmax":
            x = args[0] if args else (kwargs or {}).get("input")
            if isinstance(x, Tensor) and x.ndim > 2 and x.shape[-2:] == (self.length, self.length):
                self.first = x
        return func(*args, **(kwargs or {}))


def shift_opinion(case: Case, problem: Violation) -> str | None:
    """Say of which other position's content the score of a query on a key is made."""
    del problem
    built = case.bench.pool.get(case.config(), judged_dtypes(case.bench)[-1])
    stream = Stream(case, built, side="target")
    x = stream.draw(1, min(_LENGTH, built.config.max_len))
    if not x.is_floating_point():
        return None
    length = x.shape[1]
    leaf = x.detach().clone().requires_grad_()
    with torch.enable_grad(), _Scores(length) as seen:
        stream(leaf)
        if seen.first is None or not seen.first.requires_grad:
            return None
        odd = _odd(seen.first, leaf)
    if not odd:
        return None
    t, s, r = odd[0]
    behind = all(key > query for query, key, _ in odd)
    before = all(key < query for query, key, _ in odd)
    if not (behind or before):
        return None  # queries or keys themselves are made of several positions
    where = " on keys behind it" if behind else " on keys before it"
    steps = {other - query for query, _, other in odd}
    whose = "the next query" if steps == {1} else "the query before" if steps == {-1} else "another position"
    return (
        f"the score of a query{where} is made of {whose} too, that of query {t} on key {s} of position {r}: the shift "
        "that brings scores by distance to their keys takes them out of the row of another query"
    )


def _odd(scores: Tensor, leaf: Tensor) -> list[tuple[int, int, int]]:
    """Return queries, keys and the other positions that enter their scores."""
    length, odd, found = leaf.shape[1], list[tuple[int, int, int]](), list[tuple[int, int, Tensor]]()
    for t in range(length):
        for s in range(length):
            one = scores[..., t, s]
            if bool(one.isfinite().all()):
                (gradient,) = torch.autograd.grad(one.sum(), leaf, retain_graph=True)
                found.append((t, s, gradient[0].abs().amax(-1)))
    limit = _LEAST * max((size_of(g) for *_, g in found), default=0.0)
    for t, s, gradient in found:
        odd += [(t, s, r) for r in range(length) if r not in (t, s) and float(gradient[r]) > limit]
    return odd
