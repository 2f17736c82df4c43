"""What the curves of a row say of how it was trained: not to an end, from nothing, or by a metric read upside down."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from veriformer.ablations.verdicts.rows import Row

_FALLING = 0.1
"""Share of the whole fall of the loss that is left for the last fifth of a training that was cut off."""

_LEAST_POINTS = 10
_LEAST_SEEDS = 3
_TURNED = 0.9
"""Share of seeds whose metric went the wrong way while the loss fell."""


def of_the_curves(row: Row) -> Iterator[str]:
    """Yield, in sentences, what is to be said of the seeds of one row."""
    yield from _of_chance(row)
    yield from _of_the_end(row)
    yield from _of_the_direction(row)


def _of_chance(row: Row) -> Iterator[str]:
    if row.base is None and row.records and 2 * row.dead() > len(row.records):
        yield (
            f"{row.task.name}: the base itself is at chance in {row.dead()} of {len(row.records)} seeds: what is held "
            "against it is held against a model that does not learn"
        )


def _of_the_end(row: Row) -> Iterator[str]:
    """Tell that the loss was still falling: in its last fifth below the one before it, by more than seeds scatter."""
    falls = [fall for record in row.records if (fall := _last_fall(record)) is not None]
    if len(falls) < _LEAST_SEEDS or row.at_ceiling:
        return
    last = [fall for fall, _ in falls]
    share = statistics.fmean(last) / statistics.fmean(whole for _, whole in falls)
    if share > _FALLING and statistics.fmean(last) > 2 * statistics.stdev(last) / math.sqrt(len(last)):
        yield (
            f"{row.task.name}: the loss was still falling when training ended, by {share:.0%} of its whole fall in the "
            "last fifth: what is compared is how fast they learn; give more steps"
        )


def _last_fall(record: Any) -> tuple[float, float] | None:
    """Return by how much a loss falls from its last fifth but one to its last, and in all; None where it does not."""
    losses = record.get("curves", {}).get("loss") or []
    if len(losses) < _LEAST_POINTS or any(x is None for x in losses):
        return None
    fifth = len(losses) // 5
    start, before, end = map(statistics.fmean, (losses[:fifth], losses[-2 * fifth : -fifth], losses[-fifth:]))
    return (before - end, start - end) if start > end else None


def _of_the_direction(row: Row) -> Iterator[str]:
    """Tell a metric that falls while the loss falls, in nearly every seed, and of which more is said to be better."""
    if row.task.is_accuracy:
        return
    turned, judged = 0, 0
    for record in row.records:
        curves = record.get("curves", {})
        metrics, losses = curves.get("held_out_accuracy") or [], [x for x in curves.get("loss") or [] if x is not None]
        if len(metrics) < 2 or len(losses) < 2 or not math.isfinite(metrics[0]) or losses[-1] >= losses[0]:
            continue
        judged += 1
        moved = metrics[-1] - metrics[0]
        turned += moved > 0 if row.task.lower_is_better else moved < 0
    if judged and turned >= _TURNED * judged:
        word, other = ("less", "rises") if row.task.lower_is_better else ("more", "falls")
        yield (
            f"{row.task.name}: the {row.task.metric_name} {other} while the loss falls, and {word} of it counts as "
            f"better: is it an error? (lower_is_better={not row.task.lower_is_better})"
        )
