"""What a model's loss makes of its labels: by which row of the logits each is scored, and which are not counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.definitions.losses import loss_of_rows

Loss = Callable[[Tensor], Tensor]
_NEAR = 0.02
"""Of the share of one label in the loss: differences of two losses are rounded more than the losses are."""


@dataclass(frozen=True)
class Scored:
    """How a loss depends on its labels.

    Attributes:
        offset: s, where row t of the logits is scored by label t + s; None where no s of those tried fits.
        share: what the difference of two log likelihoods is multiplied by; NaN where they do not say.
        smoothing: share of the target that is spread, where that is what the loss has besides.
        told: what the loss has besides, in words; empty where nothing was found.
        cause: why no offset that may be right fits, in words; None where it is not known.
    """

    offset: int | None
    share: float = float("nan")
    smoothing: float | None = None
    told: str | None = None
    cause: str | None = None


def scored(loss: Loss, logits: Tensor, labels: Tensor, pool: Sequence[int], offsets: Sequence[int]) -> Scored:
    """Find the offset: L changes with one label as the log likelihood of one row does, whatever is added to the loss.

    Args:
        loss: of labels.
        logits: `[B, T, V]` or `[B, C]`.
        labels: `[B, T]` or `[B]`; each counts.
        pool: labels that count, which these were drawn from.
        offsets: to try.
    """
    log_p = logits.detach().double().log_softmax(-1)
    size = logits.shape[-1]
    base = float(loss(labels))
    changes: list[tuple[tuple[int, ...], int, int, float]] = []
    places = [tuple(at) for at in (labels >= 0).nonzero().tolist()]
    kept = places if labels.ndim == 1 else [at for at in places if at[1] in (1, 2, labels.shape[1] - 2)]
    for at in kept[:8]:
        for new in [n for n in dict.fromkeys([*labels.flatten().tolist(), *pool]) if n != int(labels[at])][:3]:
            other = labels.clone()
            other[at] = new
            changes.append((at, int(labels[at]), new, float(loss(other)) - base))
    for offset in offsets:
        shares = _shares(log_p, changes, offset)
        if shares is None:
            continue
        share = sum(shares) / len(shares)
        if share > 0 and all(abs(one - share) <= _NEAR * share for one in shares):
            return _besides(loss, logits, labels, offset, share, base, size)
    return Scored(None, cause=_elsewhere(log_p, changes))


def _shares(
    log_p: Tensor, changes: Sequence[tuple[tuple[int, ...], int, int, float]], offset: int
) -> list[float] | None:
    """Return the loss's change over that of the log likelihood of the row that an offset means; None: there is none."""
    found = []
    for at, old, new, change in changes:
        row = at if len(at) == 1 else (at[0], at[1] - offset)
        if len(row) == 2 and not 0 <= row[1] < log_p.shape[1]:
            continue
        step = float(log_p[row][old] - log_p[row][new])
        if abs(step) > 0.05:
            found.append(change / step)
    return found if len(found) > 2 else None


def _besides(loss: Loss, logits: Tensor, labels: Tensor, offset: int, share: float, base: float, size: int) -> Scored:
    """Say what a loss of a known offset has beside the mean of the log likelihoods."""
    if labels.ndim == 1:
        rows, wanted = logits[None], labels[None]
    elif offset >= 0:
        rows, wanted = logits[:, : logits.shape[1] - offset], labels[:, offset:]
    else:
        rows, wanted = logits[:, -offset:], labels[:, :offset]
    count = wanted.numel()
    spread = 1 - share * count
    if 0.005 < spread < 0.6:
        eps = round(spread, 2)
        smoothed, _ = loss_of_rows(rows, wanted, eps, -100)
        if abs(float(smoothed) - base) < 1e-3 * max(1.0, abs(base)):
            told = f"there is label smoothing of {eps:g} (declare label_smoothing={eps:g} if that is meant)"
            return Scored(offset, share, eps, told)
    if abs(spread) < 0.01:
        plain, _ = loss_of_rows(rows, wanted, 0.0, -100)
        more = base - float(plain)
        return Scored(offset, share, None, f"{more:.4g} is added that does not depend on the labels")
    if abs(share - 1) < _NEAR:
        return Scored(offset, share, None, "the losses are summed, not averaged")
    total = labels.numel()
    if offset and labels.ndim == 2:
        rolled, _ = loss_of_rows(logits, labels.roll(-offset, 1), 0.0, -100)
        if abs(float(rolled) - base) < 1e-3 * max(1.0, abs(base)):
            told = "the labels are rolled, not cut: the last row of each sample is scored by its first label"
            return Scored(offset, share, None, told)
    if offset and abs(share * total - 1) < _NEAR:
        return Scored(offset, share, None, f"the sum over {count} labels is divided by {total}")
    if offset > 0 and labels.ndim == 2 and abs(share * (total - offset) - 1) < _NEAR:
        end_to_end, _ = loss_of_rows(logits.flatten(0, 1)[None, :-offset], labels.flatten()[None, offset:], 0.0, -100)
        if abs(float(end_to_end) - base) < 1e-3 * max(1.0, abs(base)):
            told = (
                "the samples are laid end to end before the shift: the last row of each is scored by the next's first"
            )
            return Scored(offset, share, None, told)
    if labels.ndim == 2 and (lost := _unscored(loss, labels, offset, base)):
        return Scored(offset, share, None, lost)
    return Scored(offset, share, None, f"each label weighs {share:.4g}, where 1/{count} is the mean")


def _unscored(loss: Loss, labels: Tensor, offset: int, base: float) -> str | None:
    """Name the labels that count and change nothing, where the offset does not leave them without a row."""
    lost = []
    for place in range(max(offset, 0), labels.shape[1] + min(offset, 0)):
        other = labels.clone()
        own = other[0, place]
        other[0, place] = labels[labels != own].max() if bool((labels != own).any()) else own
        if bool(own >= 0) and float(loss(other)) == base:
            lost.append(place)
    if not lost:
        return None
    which = (
        f"label {lost[0]} of a sample is" if len(lost) == 1 else f"labels {', '.join(map(str, lost))} of a sample are"
    )
    return f"{which} scored by no row: lost where the sequence is cut into parts that are shifted one by one, say"


def _weighed(log_p: Tensor, changes: Sequence[tuple[tuple[int, ...], int, int, float]], offset: int) -> str | None:
    """Say that labels which are scored by their own rows weigh differently."""
    shares: dict[tuple[int, ...], float] = {}
    for at, old, new, change in changes:
        row = (at[0], at[1] - offset)
        step = float(log_p[row][old] - log_p[row][new]) if 0 <= row[1] < log_p.shape[1] else 0.0
        if abs(step) > 0.05:
            shares[at] = change / step
    if not shares or max(shares.values()) < (1 + _NEAR) * min(shares.values()):
        return None
    (most, high), (least, low) = (f(shares.items(), key=lambda one: one[1]) for f in (max, min))
    return (
        f"labels do not weigh alike: label {most[1]} of sample {most[0]} {high:.4g}, label {least[1]} of sample "
        f"{least[0]} {low:.4g}: parts (chunks, samples) are averaged one by one, whatever they count, or some labels "
        "are left out"
    )


def _elsewhere(log_p: Tensor, changes: Sequence[tuple[tuple[int, ...], int, int, float]]) -> str | None:
    """Say which row a label is scored by where that is no row of its own sample or no one offset."""
    if log_p.ndim == 2 or not changes:
        return None
    if all(abs(change) < 1e-9 for *_, change in changes):
        return "the loss does not depend on the labels that were changed"
    found: set[tuple[tuple[int, ...], tuple[int, int]]] = set()
    for at in dict.fromkeys(c[0] for c in changes):
        own = [c for c in changes if c[0] == at]
        fits = []
        for sample in range(log_p.shape[0]):
            for row in range(log_p.shape[1]):
                steps = [float(log_p[sample, row, old] - log_p[sample, row, new]) for _, old, new, _ in own]
                shares = [c[3] / s for c, s in zip(own, steps, strict=True) if abs(s) > 0.05]
                if len(shares) > 1 and min(shares) > 0 and max(shares) - min(shares) < _NEAR * max(shares):
                    fits.append((sample, row))
        if len(fits) == 1:
            found.add((at, fits[0]))
    offsets = {at[1] - row[1] for at, row in found if at[0] == row[0]}
    if found and len(offsets) == 1 and all(at[0] == row[0] for at, row in found):
        return _weighed(log_p, changes, offsets.pop())
    told = [f"label {at[1]} of sample {at[0]} by row {row[1]} of sample {row[0]}" for at, row in sorted(found)][:2]
    return f"it scores {', '.join(told)}: labels and logits lie in another order" if told else None


def uncounted(loss: Loss, logits: Tensor, labels: Tensor, offset: int, label: int, limit: float) -> str:
    """Return what becomes of a label.

    It is "refused", "counted", "not counted", "divided by all", "averaged in parts first ...", or "otherwise".

    Args:
        loss: of labels.
        logits: `[B, T, V]`.
        labels: `[B, T]`; each counts.
        offset: of the labels.
        label: that is looked at.
        limit: of rounding.
    """
    given = labels.clone()
    given[0, 1], given[-1, -1] = label, label
    if given.shape[1] > 4:  # not as many in each sample
        given[0, 2] = label
    try:
        value = float(loss(given))
    except SubjectError:
        return "refused"
    rows = logits[:, : logits.shape[1] - offset]
    left, _ = loss_of_rows(rows, given[:, offset:], 0.0, label)
    if abs(value - float(left)) <= limit:
        return "not counted"
    counted = int((given[:, offset:] != label).sum())
    if abs(value - float(left) * counted / given[:, offset:].numel()) <= limit:
        return "divided by all"
    if 0 <= label < logits.shape[-1]:
        whole, _ = loss_of_rows(rows, given[:, offset:], 0.0, -100)
        if abs(value - float(whole)) <= limit:
            return "counted"
    return _in_parts(value, rows, given[:, offset:], label, limit) or "otherwise"


def _in_parts(value: float, rows: Tensor, labels: Tensor, label: int, limit: float) -> str | None:
    """Say of which parts the means are averaged, whatever they count, where that gives the loss."""
    samples = list(zip(rows.split(1), labels.split(1), strict=True))
    parts = [("samples", samples)]
    parts += [
        (f"chunks of {n} positions", list(zip(rows.split(n, 1), labels.split(n, 1), strict=True)))
        for n in range(1, labels.shape[1])
    ]
    flat, kept = rows.flatten(0, 1), labels.flatten()
    parts += [
        (f"chunks of {n} tokens", [(x[None], y[None]) for x, y in zip(flat.split(n), kept.split(n), strict=True)])
        for n in range(2, len(kept))
    ]
    for words, pieces in parts:
        means = [float(loss_of_rows(x, y, 0.0, label)[0]) for x, y in pieces if bool((y != label).any())]
        for count in {len(means), len(pieces)}:
            if abs(value - sum(means) / count) <= limit:
                return f"averaged in parts first ({words}, say), whatever each counts, and then over these"
    return None
