"""Wrong ways to put the losses of micro-batches together."""

from __future__ import annotations

from collections.abc import Sequence


def accumulation_cause(
    got: float, means: Sequence[float], counts: Sequence[int], before: Sequence[int], sizes: Sequence[int], bound: float
) -> str | None:
    """Name the one way of putting micro-batches together that gives a number.

    Args:
        got: what the subject made of them.
        means: the loss of each.
        counts: how many labels count in each.
        before: how many labels stand in each before a shift.
        sizes: number of all labels of each, ignored ones included.
        bound: largest difference that is rounding.
    """
    sums = [mean * count for mean, count in zip(means, counts, strict=True)]
    total, number, positions = sum(sums), len(means), sum(sizes)
    by_size = sum(mean * size for mean, size in zip(means, sizes, strict=True)) / positions
    values = {
        "the mean of the micro-batches' means is taken, so that tokens of small ones weigh more": sum(means) / number,
        "the means are weighed by the number of all labels, those that do not count among them": by_size,
        "the micro-batches' means are summed, and not divided": sum(means),
        "the losses are summed, and divided by nothing": total,
        "the sum is divided by all positions, not by those counted": total / positions,
        "the sum is divided by the number of micro-batches": total / number,
        "the sum is divided by the count of the last micro-batch alone": total / max(counts[-1], 1),
        "the sum is divided by the count of the first micro-batch alone": total / max(counts[0], 1),
        "the loss of the last micro-batch alone is given": means[-1],
        "the loss of the first micro-batch alone is given": means[0],
        "the micro-batches' means are summed and divided by the count of all": sum(means) / sum(counts),
        "it is divided by the number of micro-batches once too often": total / sum(counts) / number,
    }
    if list(before) != list(counts):
        values["the sum is divided by the number of labels before the shift, first position included"] = total / sum(
            before
        )
        weighed = sum(mean * labels for mean, labels in zip(means, before, strict=True)) / sum(before)
        values["the means are weighed by the number of labels before the shift"] = weighed
    fits = [words for words, value in values.items() if abs(value - got) <= bound]
    return fits[0] if len(fits) == 1 else None
