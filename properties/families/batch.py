"""Batch: the samples of a batch know nothing of one another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.causes.tracing.localize import where_it_enters
from veriformer.properties.causes.tracing.provenance import Crossing
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.diagnosis.masks.hiding import batch_cause
from veriformer.properties.diagnosis.places.rows import misplaced
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import SEQUENCES, Stream, sides
from veriformer.properties.families.row_gradients import gradients_of_samples_add_up
from veriformer.properties.subject.palette import CROWDED
from veriformer.properties.subject.paths import DEFAULT, Path

_COUPLED = excludes_fact("batch_coupled")


@holds(
    "batch.independence",
    statement="A sample gives the same outputs alone as in a batch.",
    formula="f([x, y])_0 = f([x])_0",
    source="A model is a function of one sequence; batching is an implementation detail.",
    kinds=SEQUENCES,
    unless=_COUPLED,
    sweeps_lengths=True,
    farthest=129,
    catches=("HD04", "HD10", "HD11", "PE07"),
)
def a_sample_alone_equals_the_sample_in_a_batch(case: Case) -> None:
    """No operation of a Transformer reduces over the batch. Bits may differ (other kernels for other shapes), so the
    comparison is within rounding. Expert capacity couples samples by design: declare batch_coupled. The gradients of
    the weights add up over the samples, however many there are.
    """
    length, batch = case.length("T"), case.batch(2, 4)
    stream = Stream(case, case.built(), side=case.choice("stream", sides(case.subject)))
    x, any_row = stream.draw(batch, length), case.integer("row", 0, batch - 1)
    for path in case.paths(masks=("none", "ones")):
        together = stream(x, path=path)
        row = any_row if path.mode == "grad" and path.mask == "none" else (batch - 1) * case.reaches
        alone = stream(x[row : row + 1], path=path)
        case.close(
            together[row : row + 1],
            alone,
            f"sample {row} of a batch of {batch} gives other outputs than the same sample alone",
            cause=lambda together=together, path=path: _cause(stream, x, together, path),  # type: ignore[misc]
        )
    if case.choices.get("reach") == CROWDED:
        wide = Stream(case, case.built(dtype=judged_dtypes(case.bench)[-1]), side=stream.side)
        gradients_of_samples_add_up(case, wide, wide.draw(batch, length))
    if not torch.equal(x[0], x[1]):
        case.witness()


_DRAWS = 12
"""Other samples that are tried before it is said that one has no part in the others."""


def _cause(stream: Stream, x: Tensor, together: Tensor, path: Path) -> str | None:
    """Tell whether attention runs over the batch: transposing batch and time of the input transposes the output."""
    limit = size_of(together) * stream.case.tolerance(stream.built)
    with torch.no_grad():
        plain = stream(x)
        if path != DEFAULT and not bool(((plain[:1] - stream(x[:1])).abs() > limit).any()):
            return f"the plain path keeps samples apart, this one alone does not ({path})"
        together = plain
        if bool(((stream(x) - stream(x)).abs() > limit).any()):
            return "the same batch gives another output each time, whatever its size (see numerics.stateless)"
    if told := misplaced(stream.case):
        return told
    for _ in range(_DRAWS):  # of tokens some draws change nothing: a prefix that no sample has in common, say
        other = x.clone()
        other[-1] = stream.other(x)[-1]
        if reached := _changed(stream, x, other, together):
            break
    if not reached:
        if told := _of_the_first(stream, x.shape[1]):
            return told
        early = x.clone()
        early[0] = stream.other(x)[0]
        if _changed(stream, x, early, together):
            where = _where(stream, x, early, lambda t: t[-1:])
            return (
                "samples depend on earlier ones of the batch and on no later one: something is counted or accumulated "
                f"along the batch{', ' + where if where else ''} "
                "(declare batch_coupled=True if that is meant: one scale for a batch, expert capacity)"
            )
        turned = stream(x.flip(0)).flip(0)
        if bool(((turned - together).abs() > limit).any()):
            return "a sample's output depends on its place in the batch"
        return (
            "the samples meet in a maximum or a count, which the last does not change "
            "(declare batch_coupled=True if that is meant: expert capacity, one scale for a batch)"
        )
    if together.ndim == 3 and len(x) > 1:
        spread = (stream(other) - together).abs().amax(dim=-1)[:-1]
        same_time = x.clone()
        same_time[-1, 0] = other[-1, 0]
        moved = (stream(same_time) - together).abs().amax(dim=-1)[:-1]
        limit = size_of(together) * stream.case.tolerance(stream.built)
        if bool((spread > limit).all()) and x.shape[1] > 1 and not bool((moved[:, 1:] > limit).any()):
            return (
                "position t of one sample reaches position t of the others and no other: attention runs over the batch"
            )
    where = _where(stream, x, other, lambda t: t[:1])
    return (
        f"replacing the last sample changes {len(reached)} of {len(x) - 1} other samples: they meet in the batch"
        f"{', ' + where if where else ''} "
        "(declare batch_coupled=True if that is meant: expert capacity, one scale for a batch)"
    )


def _of_the_first(stream: Stream, length: int) -> str | None:
    """Say that a sample in the middle changes others, and never the first: that one's outputs are given to them."""
    reached: set[int] = set()
    with torch.no_grad():
        for _ in range(_DRAWS):
            x = stream.draw(4, max(length, 4))
            other = x.clone()
            other[2] = stream.other(x)[2]
            reached |= set(_changed(stream, x, other, stream(x)))
    if 1 not in reached or 0 in reached:  # what goes on through the batch reaches later ones alone
        return None
    return (
        "the first sample of a batch is right whatever the others are, and these are not: what is computed of it, or "
        "of what all seem to have in common with it, is given to them"
    )


def _meeting(stream: Stream, x: Tensor, order: list[int]) -> str | None:
    """Tell how samples meet, where they do without a mask."""
    with torch.no_grad():
        together, permuted = stream(x), stream(x[order])
    limit = size_of(together) * stream.case.tolerance(stream.built)
    moved = bool(((permuted - together[order]).abs() > limit).any())
    return _cause(stream, x, together, DEFAULT) if moved else None


def _changed(stream: Stream, x: Tensor, other: Tensor, together: Tensor) -> list[int]:
    """Return the samples that another batch changes, of those that are the same in both."""
    limit = size_of(together) * stream.case.tolerance(stream.built)
    moved = (stream(other) - together).abs().flatten(1).amax(dim=1) > limit
    same = (other == x).flatten(1).all(1)
    return [int(row) for row in (moved & same.to(moved.device)).nonzero().flatten()]


def _where(stream: Stream, x: Tensor, other: Tensor, rows: Callable[[Tensor], Tensor]) -> str | None:
    """Say where one batch parts from another on samples that they share."""
    return where_it_enters(
        stream.built.module, lambda: stream(x), lambda: stream(other), lambda t: rows(t) if len(t) == len(x) else None,
        stream.case.tolerance(stream.built), crossing=Crossing(0, ~torch.eye(len(x), dtype=torch.bool), "sample"),
    )  # fmt: skip


@holds(
    "batch.permutation",
    statement="Permuting the samples permutes the outputs.",
    formula="f(x[p]) = f(x)[p]",
    source="Consequence of independence, checked on whole batches with their masks.",
    kinds=SEQUENCES,
    unless=_COUPLED,
    catches=("HD04", "HD10"),
)
def permuting_samples_permutes_outputs(case: Case) -> None:
    """Masks permute along, so that a mask kept in another order than its samples shows."""
    length = case.length("T", low=2)
    batch = case.batch(2, 9) if case.reaches else case.choice("B", (2, 3, 4, 9, 9, 9))
    stream = Stream(case, case.built(), side=case.choice("stream", sides(case.subject)))
    x = stream.draw(batch, length)
    order = case.permutation("order", batch)
    if order == sorted(order):
        order = order[1:] + order[:1]
    mask = None
    if (
        stream.side in sides(case.subject, masked=True)
        and case.subject.takes_mask("padding")
        and case.subject.fact("padding_side", "right") != "left"
    ):
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        for row in range(batch):
            mask[row, 1 + (row * 2 + 1) % length :] = False
    permuted = stream(x[order], None if mask is None else mask[order])
    straight = stream(x, mask)
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask.cpu()
    keep = real[order] if stream.per_position else slice(None)
    case.close(
        permuted[keep],
        straight[order][keep],
        "permuting the samples of a batch does not permute its outputs",
        cause=lambda: (batch_cause(stream, x, order) if mask is not None else None) or _meeting(stream, x, order),
    )
    if worst_difference(straight[0], straight[1]).error > 0:
        case.witness()
