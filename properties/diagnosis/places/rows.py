"""Outputs that stand in the wrong place: each sample and token called by itself, and found again in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from veriformer.properties.causes.asking import first_answer, measured_once
from veriformer.properties.diagnosis.places.arrangements import mask_of_another, samples_moved
from veriformer.properties.diagnosis.places.batches import (
    BATCH,
    LENGTH,
    Batches,
    batches_of,
    kept_from_before,
    longest,
    over_the_batch,
)
from veriformer.properties.diagnosis.places.owners import wrong_owners
from veriformer.properties.diagnosis.places.samples import whose_mask
from veriformer.properties.diagnosis.places.sorting import sorted_apart
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation

_LONGEST = 20
"""Beyond the usual chunks of small tests (4, 8, 16)."""


def misplaced(case: Case, problem: Violation | None = None) -> str | None:
    """Say which output stands where, or whose mask is used for whom; None where samples and tokens are by themselves.

    Args:
        case: of the violation, on whose sizes the subject is measured anew.
        problem: the violation; what is measured does not depend on it.
    """
    return measured_once(case, ("misplaced", case.config()), lambda: next(_found(case), None))


def of_other_samples(case: Case, problem: Violation | None = None) -> str | None:
    """Say whose outputs, tokens or mask a sample gets under masks of different lengths: other causes only follow.

    Args:
        case: of the violation, on whose sizes the subject is measured anew.
        problem: the violation; what is measured does not depend on it.
    """
    return measured_once(case, ("of other samples", case.config()), lambda: next(_of_others(case), None))


def _of_others(case: Case) -> Iterator[str]:
    for batches in batches_of(case):
        x = batches.draw(2, min(3, longest(case)))
        if batches.differs(batches.together(x), batches.together(x)) or not batches.takes_mask:
            continue
        if batches.written_to() or kept_from_before(batches):
            return  # the mask of an earlier call would be told from a sample's own by nothing
        measures = (samples_moved, wrong_owners, mask_of_another)
        if told := first_answer(partial(measure, batches) for measure in measures):
            yield told


def _found(case: Case) -> Iterator[str]:
    for batches in batches_of(case):
        x = batches.draw(2, min(3, longest(case)))
        if batches.differs(batches.together(x), batches.together(x)):
            return  # drawn anew at every call: nothing can be told from a difference
        measures = (
            Batches.written_to,
            kept_from_before,
            _attention_over_the_batch,
            _counted_over_the_batch,
            _rearranged,
            sorted_apart,
            wrong_lengths,
            _over_the_batch,
            samples_moved,
            wrong_owners,
            whose_mask,
        )
        if told := first_answer(partial(measure, batches) for measure in measures):
            yield told


def _length(batches: Batches) -> int:
    return min(LENGTH, longest(batches.case))


def _attention_over_the_batch(batches: Batches) -> str | None:
    """Replace one token: where it reaches the same position of other samples, and no other position of its own."""
    if not batches.per_position or batches.tokenwise:
        return None
    x = batches.draw(BATCH, _length(batches))
    before = batches.together(x)
    for token in (0, 2):
        changed = x.clone()
        changed[1, token] = batches.draw(1, 1)[0, 0]
        if torch.equal(changed, x):
            return None
        moved = batches.rows_differ(batches.together(changed), before)
        if int(moved[:, token].sum()) < 2 or int(moved.sum()) > int(moved[:, token].sum()):
            return None
    return (
        "position t of one sample reaches position t of the others and no other position: attention runs over the "
        "batch, as if batch and time were exchanged"
    )


def _counted_over_the_batch(batches: Batches) -> str | None:
    """Give every sample the same token everywhere: positions show along time, and never along samples."""
    if not batches.per_position or batches.tokenwise:
        return None
    one = batches.draw(1, 1)
    length = _length(batches)
    x = one.expand(BATCH, length, *one.shape[2:]).contiguous()
    plain = batches.together(x)
    forms = [("", plain)]
    if batches.takes_mask:
        forms.append((" where a mask is given", batches.together(x, batches.masks([length] * BATCH, length))))
    for when, outputs in forms:
        along_time = bool(batches.rows_differ(outputs, outputs[:, :1].expand_as(outputs)).any())
        along_batch = bool(batches.rows_differ(outputs, outputs[:1].expand_as(outputs)).any())
        if along_batch and not along_time and not _samples_meet(batches, x, plain):
            told = f"the same token everywhere gives the same output at all positions{when}, and another in each sample"
            return (
                f"{told}: positions are counted along the batch axis instead of along time, as its place in the batch"
            )
    return None


def _samples_meet(batches: Batches, x: Tensor, before: Tensor) -> bool:
    """Whether other content of the first or last sample changes another one."""
    for row in (0, len(x) - 1):
        changed = x.clone()
        changed[row] = batches.draw(1, x.shape[1])[0]
        others = [r for r in range(len(x)) if r != row]
        if bool(batches.rows_differ(batches.together(changed)[others], before[others]).any()):
            return True
    return False


def _over_the_batch(batches: Batches) -> str | None:
    """Name an operation over the batch axis, where samples are not by themselves."""
    if batches.tokenwise:
        return None
    length = _length(batches)
    x = batches.draw(BATCH, length)
    lengths = [length - b % 3 for b in range(BATCH)]
    masks = [None, *([batches.masks(lengths, length)] if batches.takes_mask and length > 3 else [])]
    for mask in masks:
        real = mask if mask is not None and batches.per_position else slice(None)
        if batches.differs(batches.together(x, mask)[real], batches.alone(x, mask)[real]):

            def run(size: int, masked: bool = mask is not None) -> None:
                given = batches.masks([length - b % 3 for b in range(size)], length) if masked else None
                batches.together(batches.draw(size, length), given)

            config = batches.built.config
            taken = {length, config.d_model, config.d_head, config.d_ff, config.num_heads, config.vocab_size,
                     config.num_classes}  # fmt: skip
            first, second, *_ = (size for size in (11, 13, 17, 19, 23, 29, 31, 37, 41) if size not in taken)
            return over_the_batch(batches.built.module, run, (first, second))
    return None


def _rearranged(batches: Batches) -> str | None:
    """Match the rows of a batch with those of its samples alone."""
    length = _length(batches)
    x = batches.draw(3, length)
    got, right = batches.together(x), batches.alone(x)
    if got.shape != right.shape or not batches.differs(got, right):
        return None
    if not batches.per_position:
        order = _matches(batches, got, right)
        return None if order is None else f"samples come back in another order: {_example(order, 1)}"
    for words_in, moved in _moves(x, "input"):
        if (batches.tokenwise or x.ndim == 3 or "channels" not in words_in) and moved.shape == x.shape:
            inner = right if not words_in else batches.alone(moved.contiguous())
            for words_out, outputs in _moves(inner, "output"):
                if (words_in or words_out) and not batches.differs(got, outputs):
                    return _told(words_in, words_out, got, right, batches)
    order = _matches(batches, got, right)
    if order is None:
        return None
    told = _example(order, length)
    again = batches.draw(3, length)
    other = _matches(batches, batches.together(again), batches.alone(again))
    if other is None or other == order:
        return f"outputs come back in another order: {told}"
    return f"outputs come back in an order that depends on what they are, {_sorting(batches)}: {told}"


def _moves(x: Tensor, what: str) -> Iterator[tuple[str, Tensor]]:
    """Yield ways in which `[B, T, *]` is known to be put into the wrong order, each in words."""
    batch, length, rest = x.shape[0], x.shape[1], x.shape[2:]
    yield "", x
    way = ("[B, T, D]", "[T, B, D]") if what == "input" else ("[T, B, D]", "[B, T, D]")
    yield (
        f"the {what} is brought from {way[0]} to {way[1]} by a reshape instead of a transpose",
        x.reshape(length, batch, *rest).transpose(0, 1)
        if what == "input"
        else x.transpose(0, 1).reshape(batch, length, *rest),
    )
    if rest:
        channels = rest[-1]
        way = ("[B, T, D]", "[B, D, T]") if what == "input" else ("[B, D, T]", "[B, T, D]")
        yield (
            f"the {what} is brought from {way[0]} to {way[1]} by a reshape instead of a transpose: positions and "
            "channels are mixed",
            x.reshape(batch, channels, length).transpose(1, 2)
            if what == "input"
            else x.transpose(1, 2).reshape(batch, length, channels),
        )
    yield f"the {what} is reversed in time", x.flip(1)
    yield f"the {what} is reversed over the samples", x.flip(0)
    for by in (1, -1):
        where = "later" if by == 1 else "earlier"
        yield f"the {what} is moved by one position, round the ends, to the {where}", x.roll(by, 1)
        yield f"the {what} is moved by one sample, round the ends", x.roll(by, 0)
    if what == "output":
        for size in range(1, length):
            parts = torch.cat([part.flatten(0, 1) for part in x.split(size, dim=1)])
            yield (
                f"chunks of {size} positions are put together along the batch axis and not along time",
                parts.reshape(x.shape),
            )


def _told(words_in: str, words_out: str, got: Tensor, right: Tensor, batches: Batches) -> str:
    told = ", and ".join(words for words in (words_in, words_out) if words)
    order = _matches(batches, got, right)
    return told if order is None or words_in else f"{told}: {_example(order, right.shape[1])}"


def _matches(batches: Batches, got: Tensor, right: Tensor) -> list[int] | None:
    """Return for every row of one tensor the one row of the other that it is, up to a factor; None unless each is one.

    A factor is let pass: what is put back in the wrong order may be weighed afterwards (by a router).
    """
    rows, others = got.reshape(-1, got.shape[-1]).double(), right.reshape(-1, right.shape[-1]).double()
    if rows.shape != others.shape or not bool(rows.isfinite().all()) or rows.shape[-1] < 3:
        return None
    rows, others = (r / r.norm(dim=-1, keepdim=True).clamp(min=1e-300) for r in (rows, others))
    limit = max(64 * batches.case.tolerance(batches.built), 1e-9)
    same = (rows[:, None] - others[None]).abs().amax(-1) <= limit
    if not bool((same.sum(1) == 1).all()):
        return None
    order = same.long().argmax(1).tolist()
    return order if sorted(order) == list(range(len(order))) and order != sorted(order) else None


def _example(order: list[int], length: int) -> str:
    """Say where the first row that moved comes from."""
    at = next(i for i, source in enumerate(order) if i != source)
    moved = sum(i != source for i, source in enumerate(order))
    if length == 1:
        return f"the output of sample {at} is that of sample {order[at]}"
    places = [f"sample {i // length}, position {i % length}" for i in (at, order[at])]
    return f"the output of {places[0]} is that of {places[1]} ({moved} of {len(order)} are not in their place)"


def _sorting(batches: Batches) -> str:
    """Tell, with two tokens that are told apart, whether a sort is not undone, or applied a second time."""
    vague = "as after a sort that is not undone by its inverse"
    base = batches.draw(1, 12)
    if not base.is_floating_point():
        return vague
    pattern = torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1], device=base.device)
    noise = 1e-3 * batches.draw(1, 12)
    first, second = pattern.eq(0).nonzero().flatten(), pattern.eq(1).nonzero().flatten()
    for other in range(1, 12):
        x = torch.where(pattern.bool()[None, :, None], base[:, other : other + 1], base[:, :1]) + noise
        order = _matches(batches, batches.together(x), batches.alone(x))
        if order is None:
            continue
        for sort in (torch.cat([first, second]), torch.cat([second, first])):
            if order == sort.tolist():
                return "the order of a sort that is not undone"
            if order == sort[sort].tolist():
                return "the order of a sort that is applied a second time where its inverse belongs"
            if order == sort.argsort()[sort.argsort()].tolist():
                return "the order of a sort whose inverse is applied twice"
    return vague


def wrong_lengths(batches: Batches) -> str | None:
    """Say from which length on, or at which lengths, tokens of one sample come out otherwise than by themselves."""
    if not batches.tokenwise:
        return None
    x = batches.draw(1, _LONGEST)
    right = batches.alone(x)
    outputs = [batches.together(x[:, :n]) for n in range(1, _LONGEST + 1)]
    if any(out.shape[1] != n for n, out in enumerate(outputs, 1)):
        return None
    differ = [batches.rows_differ(out, right[:, : out.shape[1]])[0] for out in outputs]
    wrong = [n for n, rows in enumerate(differ, 1) if bool(rows.any())]
    if not wrong or len(wrong) == _LONGEST:
        return _only_in_batches(batches) if not wrong else None
    rule = _rule(wrong)
    first = wrong[0]
    rows = differ[first - 1].nonzero().flatten().tolist()
    which = f"position {rows[0]}" if len(rows) == 1 else f"positions {rows[0]} to {rows[-1]}"
    zeros = bool((outputs[first - 1][0, rows] == 0).all())
    bias = not zeros and _constant(outputs, differ, batches)
    what = (
        "zeros" if zeros else "the same numbers whatever their tokens" if bias else "other numbers than by themselves"
    )
    told = f"with {first} tokens {which} of 0 to {first - 1} give{'s' if len(rows) == 1 else ''} {what}"
    return f"{rule}: {told}"


def _rule(wrong: list[int]) -> str:
    for size in range(2, _LONGEST // 2):
        for above in (0, size):
            if wrong == [n for n in range(above + 1, _LONGEST + 1) if n % size]:
                beyond = f" above {above}" if above else ""
                return f"wrong at every length{beyond} that is no multiple of {size}"
    if wrong == list(range(wrong[0], _LONGEST + 1)):
        return f"right up to {wrong[0] - 1} tokens, wrong from {wrong[0]} on"
    return f"wrong at lengths {', '.join(map(str, wrong[:8]))}{' ...' if len(wrong) > 8 else ''}, right at the others"


def _constant(outputs: list[Tensor], differ: list[Tensor], batches: Batches) -> bool:
    """Whether the wrong rows are one and the same vector."""
    rows = torch.cat([out[0][bad] for out, bad in zip(outputs, differ, strict=True)])
    return len(rows) > 1 and not batches.differs(rows, rows[:1].expand_as(rows))


def _only_in_batches(batches: Batches) -> str | None:
    """One sample is right at every length: say which other position reaches a wrong one, if that is simple."""
    x = batches.draw(3, 6)
    before = batches.together(x)
    if not batches.differs(before, batches.alone(x)):
        return None
    changed = x.clone()
    changed[0, 2] = batches.draw(1, 1)[0, 0]
    moved = batches.rows_differ(batches.together(changed), before).nonzero().tolist()
    others = [(b, t) for b, t in moved if (b, t) != (0, 2)]
    if others and all(t == 2 for _, t in others):
        return (
            "one sample alone is right; in a batch a token changes the outputs at the same position of other samples: "
            "something runs over the batch"
        )
    return None
