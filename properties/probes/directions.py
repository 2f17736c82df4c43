"""Directions along which a gradient is compared with a difference quotient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.case import Case
from veriformer.properties.probes.untrained_rows import trained_places


class Directions:
    """Draws a direction for each leaf, 0 where torch gives no gradient by design: see `trained_places`.

    Attributes:
        places: 1 where there is a gradient to judge, for each leaf; empty where it is everywhere.
    """

    def __init__(self, case: Case, built: Built, args: list[Any], leaves: Sequence[Tensor]) -> None:
        self._case = case
        self._leaves = leaves
        tokens = [x for x in args if isinstance(x, Tensor) and not x.is_floating_point()]
        embeds = case.subject.takes_tokens and isinstance(built.module, nn.Module)
        run = case.caller(built, *args)
        self.places: list[Tensor] = case.apply(trained_places, run, tokens, *leaves) if embeds else []

    def __call__(self) -> list[Tensor]:
        """Draw them."""
        directions = [self._case.normal(*leaf.shape, dtype=torch.float64) for leaf in self._leaves]
        if not self.places:
            return directions
        return [direction * place for direction, place in zip(directions, self.places, strict=True)]
