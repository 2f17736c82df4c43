"""Wrong formulas of losses, and which of them gives a subject's number on inputs that tell them apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.formulas.numbers import which
from veriformer.properties.formulas.sharded_losses import sharded

Loss = Callable[[Tensor, Tensor], Tensor]


class _Terms:
    """The terms of a loss in float64, position by position, after labels are moved by `shift`."""

    def __init__(self, logits: Tensor, labels: Tensor, ignore: int, shift: int) -> None:
        self.before = int((labels != ignore).sum())
        length = logits.shape[1]
        self.logits, self.labels = logits.double()[:, : length - shift], labels[:, shift:]
        self.real = self.labels != ignore
        self.log_p = self.logits.log_softmax(-1)
        self.nll = -self.log_p.gather(-1, self.labels.clamp(min=0)[..., None])[..., 0]
        self.smooth = -self.log_p.mean(-1)
        self.counted = max(int(self.real.sum()), 1)

    def sum(self, terms: Tensor) -> Tensor:
        """Return the sum over what is counted."""
        return terms.masked_fill(~self.real, 0).sum()


def _formulas(
    logits: Tensor, labels: Tensor, eps: float, ignore: int, z: float, shift: int
) -> Iterator[tuple[str, Tensor]]:
    t = _Terms(logits, labels, ignore, shift)
    n, size, width = t.counted, t.labels.numel(), logits.shape[-1]
    log_z = t.logits.logsumexp(-1).square()
    terms = (1 - eps) * t.nll + eps * t.smooth + z * log_z
    whole = t.sum(terms)
    yield "", whole / n
    yield "the losses are summed, not averaged", whole
    if n != size:
        yield "the sum is divided by all positions, not by those counted", whole / size
        label = (1 - eps) * t.nll + eps * t.smooth + z * log_z
        yield f"the ignored label {ignore} is counted, as if it were label 0", label.mean()
    if t.before not in (n, size):
        yield "the sum is divided by the number of labels before the shift", whole / t.before
    yield "the sum is divided by the number of samples, not of counted positions", whole / len(labels)
    yield "the loss is also divided by the vocabulary (a mean over positions and classes)", whole / n / width
    per_sample = [
        (terms[b].masked_fill(~t.real[b], 0).sum() / max(int(t.real[b].sum()), 1)) for b in range(len(labels))
    ]
    yield "a mean over each sample is taken first, and then the mean of these", torch.stack(per_sample).mean()
    yield "the logarithm has base 2", whole / n / math.log(2)
    yield "the sign is turned: the log likelihood is not negated", -whole / n
    p = t.logits.softmax(-1)
    again = _Terms(torch.cat([p, p[:, :1].expand(-1, shift, -1)], 1) if shift else p, labels, ignore, shift)
    twice = again.sum((1 - eps) * again.nll + eps * again.smooth + z * again.logits.logsumexp(-1).square())
    yield "log_softmax is applied to probabilities", twice / n
    yield "the probability stands in place of its logarithm", t.sum(-((-t.nll).exp())) / n
    if z:
        yield from _z_losses(t, (1 - eps) * t.nll + eps * t.smooth, z)
    if eps:
        yield from _smoothings(t, eps, z * t.sum(log_z) / n, width)
    for other in {0, 1, 2} - {shift}:
        if logits.shape[1] > other:
            moved = _Terms(logits, labels, ignore, other)
            total = moved.sum((1 - eps) * moved.nll + eps * moved.smooth + z * moved.logits.logsumexp(-1).square())
            words = ("the labels are not moved", "the labels are moved by one", "the labels are moved twice")[other]
            yield words, total / moved.counted
    for words, each in sharded(t.logits, t.labels.clamp(min=0), eps):
        yield words, t.sum(each + z * log_z) / n
    if shift and len(labels) > 1:
        flat = _Terms(logits.flatten(0, 1)[None], labels.flatten()[None], ignore, shift)
        total = flat.sum((1 - eps) * flat.nll + eps * flat.smooth + z * flat.logits.logsumexp(-1).square())
        yield (
            "the labels are moved after samples were joined: the last position of each is to predict the first token "
            "of the next one",
            total / flat.counted,
        )
    backwards = _Terms(logits[:, 1:], labels[:, :-1], ignore, 0)
    total = backwards.sum(
        (1 - eps) * backwards.nll + eps * backwards.smooth + z * backwards.logits.logsumexp(-1).square()
    )
    yield (
        "the labels are moved the wrong way: each position is to predict the token before it",
        total / backwards.counted,
    )


def _z_losses(t: _Terms, rest: Tensor, z: float) -> Iterator[tuple[str, Tensor]]:
    """Yield wrong z-losses beside the other terms."""
    n, log_z = t.counted, t.logits.logsumexp(-1)
    plain, below = t.sum(rest) / n, log_z - t.logits.amax(-1)
    yield "there is no z-loss", plain
    for words, terms in (
        ("is that of log Z, not of its square", log_z),
        (
            "squares the logarithm of the sum of exp(x - max), to which the maximum is not added back: it is not log Z",
            below.square(),
        ),
        ("is half of the square of log Z", log_z.square() / 2),
        ("is twice the square of log Z", 2 * log_z.square()),
        ("squares Z's logarithm to base 2", (log_z / math.log(2)).square()),
        ("is of the mean of the exponentials, not of their sum", (log_z - math.log(t.logits.shape[-1])).square()),
    ):
        yield f"the z-loss {words}", plain + z * t.sum(terms) / n
    yield "the z-loss is summed, not averaged", plain + z * t.sum(log_z.square())
    yield "the z-loss is taken off, not added", plain - z * t.sum(log_z.square()) / n
    yield "the z-loss squares the mean of log Z over positions", plain + z * (t.sum(log_z) / n).square()
    if n != t.labels.numel():
        yield "the z-loss is summed over ignored positions too", plain + z * log_z.square().sum() / n
        yield "the z-loss is averaged over all positions, ignored ones included", plain + z * log_z.square().mean()


def _smoothings(t: _Terms, eps: float, rest: Tensor, width: int) -> Iterator[tuple[str, Tensor]]:
    n, size = t.counted, t.labels.numel()
    sharp, smooth = t.sum(t.nll) / n, t.sum(t.smooth) / n
    yield "there is no label smoothing", sharp + rest
    others = (smooth * width - sharp) / (width - 1)
    yield (
        "the smoothing is spread over the other V - 1 labels, not over all V",
        (1 - eps) * sharp + eps * others + rest,
    )
    yield (
        "the label keeps 1 - eps and the others get eps / V",
        (1 - eps) * sharp + eps * others * (width - 1) / width + rest,
    )
    yield "the likelihood keeps its whole weight (1, not 1 - eps)", sharp + eps * smooth + rest
    yield (
        "the smoothing term is summed over the vocabulary, not averaged",
        (1 - eps) * sharp + eps * smooth * width + rest,
    )
    yield "the weights of likelihood and smoothing are exchanged", eps * sharp + (1 - eps) * smooth + rest
    yield "the smoothing is applied twice", (1 - eps) * ((1 - eps) * sharp + eps * smooth) + eps * smooth + rest
    yield "the smoothing term has the wrong sign", (1 - eps) * sharp - eps * smooth + rest
    if n != size:
        whole = t.smooth.sum()
        yield (
            "the smoothing term is summed over all positions, ignored ones included, and divided by those counted",
            (1 - eps) * sharp + eps * whole / n + rest,
        )
        yield (
            "the smoothing term is averaged over all positions, ignored ones included",
            (1 - eps) * sharp + eps * whole / size + rest,
        )
        yield (
            "the smoothing term is divided by all positions, not by those counted",
            (1 - eps) * sharp + eps * smooth * n / size + rest,
        )


def loss_cause(
    loss: Loss,
    vocabulary: int,
    dtype: torch.dtype,
    *,
    eps: float,
    ignore: int,
    z_loss: float,
    shift: int,
    hides: bool,
) -> str | None:
    """Name the one wrong formula that gives the subject's number, on three inputs of unequal shares of ignored labels.

    Args:
        loss: the subject's.
        vocabulary: of its labels.
        dtype: of its logits.
        eps: declared label smoothing.
        ignore: label that is not counted.
        z_loss: declared.
        shift: 1 if the loss moves the labels.
        hides: whether labels that are not counted may be given.

    Returns:
        None where none fits, where more than one does, or where the declared formula holds.
    """
    left: set[str] | None = None
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        logits = torch.randn(3, 7, vocabulary, generator=generator, dtype=torch.float64).to(dtype) * 3
        labels = torch.randint(0, vocabulary, (3, 7), generator=generator)
        if hides:
            labels[0, 3:] = labels[1, 5:] = ignore
            labels[2, 2] = ignore
        got = float(loss(logits, labels).detach().double())
        bound = 64 * epsilon(dtype) * max(1.0, abs(got))
        fits = {
            words
            for words, value in _formulas(logits, labels, eps, ignore, z_loss, shift)
            if abs(float(value) - got) <= bound
        }
        left = fits if left is None else left & fits
    return left.pop() if left is not None and len(left) == 1 and "" not in left else None


def terms_beside(
    loss: Loss, vocabulary: int, dtype: torch.dtype, *, ignored: Sequence[int], shifts: Sequence[int]
) -> tuple[float, float, int, int] | None:
    """Return what a loss is made of besides the likelihood: the smoothing, the z-loss, the label left out, the shift.

    The loss is linear in both shares, so that six inputs tell them, and whether they are all that it has.

    Args:
        loss: the subject's.
        vocabulary: of its labels.
        dtype: of its logits.
        ignored: labels that may be left out, the likeliest first.
        shifts: by which labels may be moved.

    Returns:
        None where no such sum gives the subject's numbers.
    """
    generator = torch.Generator().manual_seed(7)
    drawn = [
        (
            torch.randn(2, 8, vocabulary, generator=generator, dtype=torch.float64).to(dtype) * 3,
            torch.randint(0, vocabulary, (2, 8), generator=generator),
        )
        for _ in range(6)
    ]
    got = torch.tensor([float(loss(*pair).detach().double()) for pair in drawn], dtype=torch.float64)
    bound = 256 * epsilon(dtype) * float(got.abs().amax().clamp(min=1))
    for ignore, shift in itertools.product(ignored, shifts):
        terms = [_Terms(*pair, ignore, shift) for pair in drawn]
        means = [[t.sum(x) / t.counted for x in (t.nll, t.smooth, t.logits.logsumexp(-1).square())] for t in terms]
        table = torch.tensor(means, dtype=torch.float64)
        sides = torch.stack([table[:, 1] - table[:, 0], table[:, 2]], 1)
        shares = torch.linalg.lstsq(sides, (got - table[:, 0])[:, None]).solution[:, 0]
        if not bool((sides @ shares - (got - table[:, 0])).abs().amax() <= bound):
            continue
        smoothing, z_loss = (float(f"{share:.3g}") for share in shares.tolist())
        smoothing, z_loss = (0.0 if abs(x) < 1e-6 else x for x in (smoothing, z_loss))
        if 0 <= smoothing < 0.6 and 0 <= z_loss < 0.1:
            return smoothing, z_loss, ignore, shift
    return None


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
    edge = "; a label at the edge of a block of ids counts in the block beside it too" if len(off) > 1 else ""
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
            told = mean_of_means(loss, formula, wrong[-1], vocabulary, dtype)
            return told or f"the loss is wrong {what.format(which(wrong, numbers))}, else right"
    return None


def mean_of_means(loss: Loss, formula: Loss, length: int, vocabulary: int, dtype: torch.dtype) -> str | None:
    """Tell whether chunks of tokens count alike, a last one that is not full as much as the others.

    Args:
        loss: the subject's.
        formula: gives what is right.
        length: of a sample for which it is wrong.
        vocabulary: of its labels.
        dtype: of its logits.
    """
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(1, length, vocabulary, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, vocabulary, (1, length), generator=generator)
    value, right = float(loss(logits, labels).detach().double()), float(formula(logits, labels))
    bound = 64 * epsilon(dtype) * max(4.0, abs(value))
    if abs(value - right) <= bound:
        return None
    for size in range(2, length):
        parts = zip(logits.split(size, 1), labels.split(size, 1), strict=True)
        means = [float(formula(x, y)) for x, y in parts]
        if abs(value - sum(means) / len(means)) <= bound:
            return (
                f"the mean of the means of chunks of {size} tokens is taken: a chunk with fewer labels that count "
                "weighs as much as a full one"
            )
    return None


def accumulation_cause(
    got: float, means: Sequence[float], counts: Sequence[int], before: Sequence[int], positions: int, bound: float
) -> str | None:
    """Name the one way of putting micro-batches together that gives a number.

    Args:
        got: what the subject made of them.
        means: the loss of each.
        counts: how many labels count in each.
        before: how many labels stand in each before a shift.
        positions: number of all labels, ignored ones included.
        bound: largest difference that is rounding.
    """
    sums = [mean * count for mean, count in zip(means, counts, strict=True)]
    total, number = sum(sums), len(means)
    values = {
        "the mean of the micro-batches' means is taken, so that tokens of small ones weigh more": sum(means) / number,
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
