"""Tokens that are sorted, by experts or by length, and not put back where they were."""

from __future__ import annotations

from functools import partial

import torch

from veriformer.properties.causes.tracing.provenance import Crossing, line_that_crosses, sorted_at
from veriformer.properties.diagnosis.places.batches import LENGTH, Batches, longest

_STEP = 0.02  # of the way to other tokens: so little that all are sorted as before


def sorted_apart(batches: Batches) -> str | None:
    """Name the line that sorts tokens, where each is to be by itself and gets what comes of others."""
    if not batches.tokenwise:
        return None
    length = min(LENGTH, longest(batches.case))
    x = batches.draw(1, length)
    if not sorted_at(lambda: batches.together(x)):
        return None
    crossing = Crossing(1, ~torch.eye(length, dtype=torch.bool, device="cpu"), "position")
    limit = batches.limit(batches.together(x))
    run = partial(batches.case.call, batches.built)  # with its graph
    return line_that_crosses(run, x, torch.lerp(x, batches.draw(1, length), _STEP), crossing, limit)
