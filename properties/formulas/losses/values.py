"""Wrong formulas of losses, and which of them gives a subject's number on inputs that tell them apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.formulas.losses.shards import sharded

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
        self.log_z = self.logits.logsumexp(-1).square()
        self.counted = max(int(self.real.sum()), 1)

    def each(self, eps: float, z: float = 0.0) -> Tensor:
        """Return the loss of each position, smoothed by `eps`, with a z-loss."""
        return (1 - eps) * self.nll + eps * self.smooth + z * self.log_z

    def sum(self, terms: Tensor) -> Tensor:
        """Return the sum over what is counted."""
        return terms.masked_fill(~self.real, 0).sum()


def _formulas(
    logits: Tensor, labels: Tensor, eps: float, ignore: int, z: float, shift: int
) -> Iterator[tuple[str, Tensor]]:
    t = _Terms(logits, labels, ignore, shift)
    n, size, width = t.counted, t.labels.numel(), logits.shape[-1]
    log_z, terms = t.log_z, t.each(eps, z)
    whole = t.sum(terms)
    yield "", whole / n
    yield "the losses are summed, not averaged", whole
    if n != size:
        yield "the sum is divided by all positions, not by those counted", whole / size
        yield f"the ignored label {ignore} is counted, as if it were label 0", terms.mean()
    if t.before not in (n, size):
        yield "the sum is divided by the number of labels before the shift", whole / t.before
    yield "the sum is divided by the number of samples, not of counted positions", whole / len(labels)
    yield "the loss is also divided by the vocabulary (a mean over positions and classes)", whole / n / width
    per_sample = [
        (terms[b].masked_fill(~t.real[b], 0).sum() / max(int(t.real[b].sum()), 1)) for b in range(len(labels))
    ]
    yield "a mean over each sample is taken first, and then the mean of these", torch.stack(per_sample).mean()
    yield "the logarithm has base 2", whole / n / math.log(2)
    if n != size:
        yield from _by_length(t, terms)
    yield "the sign is turned: the log likelihood is not negated", -whole / n
    p = t.logits.softmax(-1)
    again = _Terms(torch.cat([p, p[:, :1].expand(-1, shift, -1)], 1) if shift else p, labels, ignore, shift)
    twice = again.sum(again.each(eps, z))
    yield "log_softmax is applied to probabilities", twice / n
    yield "the probability stands in place of its logarithm", t.sum(-((-t.nll).exp())) / n
    if z:
        yield from _z_losses(t, t.each(eps), z)
    if eps:
        yield from _smoothings(t, eps, z * t.sum(log_z) / n, width)
    for other in {0, 1, 2} - {shift}:
        if logits.shape[1] > other:
            moved = _Terms(logits, labels, ignore, other)
            total = moved.sum(moved.each(eps, z))
            words = ("the labels are not moved", "the labels are moved by one", "the labels are moved twice")[other]
            yield words, total / moved.counted
    for words, each in sharded(t.logits, t.labels.clamp(min=0), eps):
        yield words, t.sum(each + z * log_z) / n
    if shift and len(labels) > 1:
        flat = _Terms(logits.flatten(0, 1)[None], labels.flatten()[None], ignore, shift)
        total = flat.sum(flat.each(eps, z))
        yield (
            "the labels are moved after samples were joined: the last position of each is to predict the first token "
            "of the next one",
            total / flat.counted,
        )
    backwards = _Terms(logits[:, 1:], labels[:, :-1], ignore, 0)
    total = backwards.sum(backwards.each(eps, z))
    yield (
        "the labels are moved the wrong way: each position is to predict the token before it",
        total / backwards.counted,
    )


def _by_length(t: _Terms, terms: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield means of chunks, each over what counts in it, weighed by all that stands in it."""
    flat, real = terms.masked_fill(~t.real, 0).flatten(), t.real.flatten()
    for words, length in (("tokens", len(flat)), ("positions", t.labels.shape[1])):
        for size in range(2, length):
            if words == "tokens" and size == t.labels.shape[1]:
                continue  # samples, of one length
            if words == "tokens":
                parts = list(zip(flat.split(size), real.split(size), strict=True))
            else:
                rows = terms.masked_fill(~t.real, 0)
                parts = list(zip(rows.split(size, 1), t.real.split(size, 1), strict=True))
            means = [x.sum() / keep.sum().clamp(min=1) * keep.numel() for x, keep in parts]
            yield (
                f"chunks of {size} {words} are averaged first, each over what counts in it, and weighed by all that "
                "stands in it, ignored labels too",
                torch.stack(means).sum() / len(flat),
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


def _other_sizes(width: int) -> Iterator[tuple[int, str]]:
    """Yield by what else a sum over a vocabulary may be divided, with how that is got from its size."""
    yield width - 1, ""
    yield width + 1, " (one more, or rounded up to whole tiles)"
    rounded = {-(-width // tile) * tile: tile for tile in (256, 128, 64, 32, 16, 8, 4)}
    for many, tile in rounded.items():
        if many > width + 1:
            yield many, f" (rounded up to multiples of {tile})"


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
    logits = t.sum(t.logits.mean(-1)) / n
    for many, how in _other_sizes(width):
        words = f"divided by {many}, where the vocabulary has {width} ids{how}"
        yield f"the smoothing term is {words}", (1 - eps) * sharp + eps * smooth * width / many + rest
        yield (
            f"the sum of logits in the smoothing term is {words}",
            (1 - eps) * sharp + eps * (smooth + logits * (1 - width / many)) + rest,
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
