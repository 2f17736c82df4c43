"""For which labels, lengths or sizes of the vocabulary a loss is wrong, and how its chunks are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.formulas.numbers import which

Loss = Callable[[Tensor, Tensor], Tensor]


def wrong_labels(loss: Loss, vocabulary: int, dtype: torch.dtype, *, formula: Loss, shift: int) -> str | None:
    """Say for which labels a loss is wrong, and by what; None where it is so for none, or for all.

    Args:
        loss: the subject's.
        vocabulary: of its labels.
        dtype: of its logits.
        formula: gives what is right.
        shift: 1 if the loss moves the labels.
    """
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(1, 1 + shift, vocabulary, generator=generator, dtype=torch.float64).to(dtype)
    row, bound = logits[0, 0].double(), 64 * epsilon(dtype) * 4
    off: dict[int, float] = {}
    for label in range(vocabulary):
        labels = torch.full((1, 1 + shift), label)
        error = float(loss(logits, labels).detach().double()) - float(formula(logits, labels))
        if not abs(error) <= bound:
            off[label] = error
    if not off or len(off) == vocabulary:
        return None
    told = f"with one token the loss is wrong for the labels {which(list(off), range(vocabulary))}, else it is right"
    reasons = {words for step in (-1, 1) for words in _another_logit(row, off, step, bound)}
    return f"{told}: {reasons.pop()}" if len(reasons) == 1 else told


def _another_logit(row: Tensor, off: dict[int, float], step: int, bound: float) -> Iterator[str]:
    """Yield how the logit of the next id, or that of the one before, enters, where it explains each error."""
    beside = f"l {'-' if step < 0 else '+'} 1"
    top, whole = float(row.amax()), float(row.logsumexp(0))
    edge = "; a label at the edge of a block (a shard) of ids counts in the block beside it too"
    edge += ", whose end is taken for its last (<= for <)" if step < 0 else ""
    found: list[tuple[str, Callable[[int], float]]] = []
    if all(0 <= label + step < len(row) for label in off):
        near = {label: float(row[label + step]) for label in off}
        found = [
            (f"the logit of {beside} is added to that of the label l{edge}", lambda n: -near[n]),
            (
                f"the logit of {beside}, less the maximum, is added to that of the label l{edge}",
                lambda n: top - near[n],
            ),
            (f"the logit of {beside} stands in place of that of the label l", lambda n: float(row[n]) - near[n]),
        ]
    if step < 0:
        found += [
            ("the logit of the label is left out", lambda n: float(row[n])),
            ("the logit of the label, less the maximum, is left out", lambda n: float(row[n]) - top),
            ("such a label is not counted: the loss is 0", lambda n: float(row[n]) - whole),
        ]
    for words, error in found:
        if all(abs(error(label) - off[label]) <= bound for label in off):
            yield words


def wrong_sizes(loss: Loss, vocabulary: int, dtype: torch.dtype, *, formula: Loss, shift: int) -> str | None:
    """Say at which numbers of tokens, or sizes of the vocabulary, a loss is wrong; None where at none, or at all.

    Args:
        loss: the subject's.
        vocabulary: of its labels.
        dtype: of its logits.
        formula: gives what is right.
        shift: 1 if the loss moves the labels.
    """
    generator = torch.Generator().manual_seed(7)

    def is_wrong(length: int, width: int) -> bool:
        logits = torch.randn(1, length, width, generator=generator, dtype=torch.float64).to(dtype)
        labels = torch.randint(0, width, (1, length), generator=generator)
        wanted = float(formula(logits, labels))
        return not abs(float(loss(logits, labels).detach().double()) - wanted) <= 64 * epsilon(dtype) * max(4.0, wanted)

    for what, numbers, of in (
        ("with {} tokens in one sample", range(1 + shift, 25), lambda n: (n, vocabulary)),
        ("for a vocabulary of {}", range(2, 25), lambda n: (1 + shift, n)),
    ):
        wrong = [n for n in numbers if is_wrong(*of(n))]
        if wrong and len(wrong) < len(numbers):
            told = in_chunks(loss, formula, wrong[-1], vocabulary, dtype, shift)
            return told or f"the loss is wrong {what.format(which(wrong, numbers))}, else right"
    return None


def in_chunks(loss: Loss, formula: Loss, length: int, vocabulary: int, dtype: torch.dtype, shift: int) -> str | None:
    """Tell whether chunks of tokens count alike, a last one that is not full as much as others, or are shifted alone.

    Args:
        loss: the subject's.
        formula: gives what is right.
        length: of a sample for which it is wrong.
        vocabulary: of its labels.
        dtype: of its logits.
        shift: 1 if the loss moves the labels.
    """
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(1, length, vocabulary, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, vocabulary, (1, length), generator=generator)
    value, right = float(loss(logits, labels).detach().double()), float(formula(logits, labels))
    bound = 64 * epsilon(dtype) * max(4.0, abs(value))
    if abs(value - right) <= bound:
        return None

    def means_of(spans: list[tuple[int, int]]) -> list[float]:
        return [float(formula(logits[:, a:b], labels[:, a:b])) for a, b in spans]

    for size in range(2, length):
        means = means_of([(a, min(a + size + shift, length)) for a in range(0, length - shift, size)])
        if abs(value - sum(means) / len(means)) <= bound:
            return (
                f"the mean of the means of chunks of {size} tokens is taken: a chunk with fewer labels that count "
                "weighs as much as a full one"
            )
        spans = [(a, b) for a in range(0, length, size) if (b := min(a + size, length)) - a > shift]
        counts, means = [b - a - shift for a, b in spans], means_of(spans)
        whole = sum(m * n for m, n in zip(means, counts, strict=True))
        taken = (whole / sum(counts), sum(means) / len(means), whole / (length - shift))
        if shift and min(abs(value - one) for one in taken) <= bound:
            return (
                f"the labels are moved inside each chunk of {size} tokens: the first label of every later chunk is "
                "scored by no row"
            )
    return None
