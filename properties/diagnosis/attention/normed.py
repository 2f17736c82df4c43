"""Over which axis queries and keys are normalised, as the weights of an attention tell."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_AXES = {"the channels": -1, "the heads": 1, "the positions": 2, "the samples": 0}


def normed_over(weights: Tensor, query: Tensor, key: Tensor) -> str | None:
    """Return over which other axes than the channels queries and keys are normalised; None if over those, or unknown.

    Args:
        weights: `[B, H, T, S]`, all positive.
        query: `[B, H, T, K]`, float64.
        key: `[B, H, S, K]`, float64.
    """
    if not bool((weights > 0).all()):
        return None
    logs = weights.log()
    fitting = [
        (of_query, of_key)
        for of_query, axis in _AXES.items()
        for of_key, other in _AXES.items()
        if _fits(logs, F.normalize(query, dim=axis) @ F.normalize(key, dim=other).transpose(-2, -1))
    ]
    if len(fitting) != 1 or fitting[0] == ("the channels", "the channels"):
        return None
    of_query, of_key = fitting[0]
    if of_query == of_key:
        return f"queries and keys are normalised over {of_key} instead of the channels of a head"
    which, axis = ("keys", of_key) if of_query == "the channels" else ("queries", of_query)
    return f"{which} are normalised over {axis} instead of the channels of a head"


def _fits(logs: Tensor, scores: Tensor) -> bool:
    """Return whether log weights are linear in the scores, with one slope for each head and an offset for each row."""
    logs, scores = logs - logs.mean(-1, keepdim=True), scores - scores.mean(-1, keepdim=True)
    for head in range(logs.shape[1]):
        y, x = logs[:, head], scores[:, head]
        slope = (x * y).sum() / (x * x).sum()
        if bool(((y - slope * x).abs() > 1e-6).any()):
            return False
    return bool(torch.isfinite(logs).all())
