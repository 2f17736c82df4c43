"""By which angles the queries and keys of an attention are turned, told by what they come from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import Attention
from veriformer.properties.anatomy.sources import Head, parts_of
from veriformer.properties.anatomy.traced import Traced
from veriformer.properties.definitions.angles import paired, turned

BASES = (1e4, 1e2, 5e2, 1e3, 5e3, 2e4, 1e5, 5e5, 1e6, 1e7)
"""Bases of frequencies that are tried where the declared one does not act."""

_LARGEST = 1e10  # base of released models: 1e7
_BACK = 60  # values between a norm of queries and the scores: a rotation in a dozen steps, a cache
_NEXT = 24  # products behind an attention of which one may take what it gives: heads that are computed in turn

Sides = tuple[tuple[Tensor, list[Head | None]], ...]
"""Rows `[B, H, T, K]`, and where each head of them comes from."""


def traced_back(seen: Traced, attention: Attention) -> Attention | None:
    """Return an attention with a source for every head of queries and keys; None where one is not known.

    Where it is no product (queries that have passed a norm), it is what was there before the rotation: a rotation keeps
    the length of every pair of channels.
    """
    if all(x is not None for x in (*attention.query_from, *attention.key_from)):
        return attention
    query, key = (_before_turning(seen, rows, attention.when) for rows in (attention.query, attention.key))
    return None if query is None or key is None else replace(attention, query_from=query, key_from=key)


def _before_turning(seen: Traced, rows: Tensor, when: int) -> list[Head | None] | None:
    """Return, by head, what rows `[B, H, T, K]` were before they were turned; None where nothing like it is seen."""
    width = rows.shape[-1]
    parts = [n for n in (width, width // 2, width // 4) if n >= 2 and not n % 2]
    forms = [(one, n) for n in parts for one in ("halves", "interleaved")]
    lengths = [_lengths_of_pairs(rows, *form) for form in forms]
    size = 1e2 * seen.limit * float(rows.abs().amax())
    for value in seen.values[max(0, when - _BACK) : when]:  # the first one: halves that change places keep them, too
        for given in _by_head(value.output, rows):
            if float((given - rows).abs().amax()) <= size:
                return None  # the rows themselves: nothing turned them
            for form, expected in zip(forms, lengths, strict=True):
                if float((_lengths_of_pairs(given, *form) - expected).abs().amax()) <= size:
                    return [Head(given[:, h], 1.0, value.when, value.place, 0, 1) for h in range(rows.shape[1])]
    return None


def _by_head(x: Tensor, rows: Tensor) -> Iterator[Tensor]:
    """Yield a value in the form of rows `[B, H, T, K]`, heads that share keys repeated."""
    batch, heads, length, width = rows.shape
    count, rest = divmod(x.numel(), batch * length * width)
    if rest or not count or heads % count:
        return
    wide = x.cpu().double()
    if x.shape[-1] == width and x.numel() == wide.reshape(batch, -1, width).numel():
        yield wide.reshape(batch, count, length, width).repeat_interleave(heads // count, 1)
    yield wide.reshape(batch, length, count, width).transpose(1, 2).repeat_interleave(heads // count, 1)


def _lengths_of_pairs(x: Tensor, layout: str, width: int) -> Tensor:
    """Return the lengths of the pairs of channels that a rotation of some width turns, and the channels behind."""
    one, other = paired(x[..., :width], layout)
    return torch.cat([torch.hypot(one, other), x[..., width:]], dim=-1)


def rotation_misfit(attention: Attention, base: float, width: int, layout: str) -> float:
    """Return how far queries and keys are from their sources turned by t base^(-2i/width), relatively.

    Args:
        attention: of which all sources are known.
        base: of the frequencies.
        width: channels that are turned.
        layout: "halves", "interleaved" or "" for the nearer one.
    """
    both = ((attention.query, attention.query_from), (attention.key, attention.key_from))
    return turning_misfit(both, base, width, layout)


def turning_misfit(sides: Sides, base: float, width: int, layout: str) -> float:
    """Return the relative error of the sense and first position that explain rows best; see `rotation_misfit`.

    An odd number of channels is counted as it is, or without the last one, which is not turned.
    """
    # a first position of 1 or 2 gives the same scores as one of 0
    forms = itertools.product([layout] if layout else ["halves", "interleaved"], (1.0, -1.0), (0, 1, 2))
    widths = (width, width - 1) if width % 2 and width > 1 else (width,)
    best = torch.inf
    for form, one in itertools.product(forms, widths):
        worst = 0.0
        for error in _errors(sides, base, one, *form):
            worst = max(worst, error)
            if not worst < best:  # another form explains them better
                break
        best = min(best, worst)
    return best


def _errors(sides: Sides, base: float, width: int, layout: str, sign: float, start: int) -> Iterator[float]:
    for rows, sources in sides:
        at = torch.arange(rows.shape[2], dtype=torch.float64) + start
        angles = at[:, None] * base ** (-torch.arange(0, width - 1, 2, dtype=torch.float64) / width)
        for head, source in enumerate(sources):
            if source is not None:
                wanted = turned(source.source * source.factor, angles, layout, sign)
                yield float((rows[:, head] - wanted).abs().amax() / rows[:, head].abs().amax())


def frequencies(attention: Attention, width: int, layout: str) -> Tensor | None:
    """Return by which angle each pair of channels turns from one position to the next, `[width / 2]`.

    None where heads, queries and keys, samples and positions do not agree on it. Angles lie in (0, pi): a pair
    that turns the other way counts as turning by as much.
    """
    for arrangement in [layout] if layout else ["halves", "interleaved"]:
        found = [
            turn
            for rows, sources in ((attention.query, attention.query_from), (attention.key, attention.key_from))
            for head, source in enumerate(sources)
            if source is not None and (turn := _turn(rows[:, head], source.source, width, arrangement)) is not None
        ]
        count = sum(s is not None for s in (*attention.query_from, *attention.key_from))
        if count and len(found) == count and all(float((f - found[0]).abs().amax()) <= 1e-4 for f in found):
            return found[0]
    return None


def _turn(rows: Tensor, source: Tensor, width: int, layout: str) -> Tensor | None:
    """Return the angles from one position to the next of rows `[B, T, K]`; None where they are not the same for all."""
    given, made = (torch.complex(*paired(x[..., : width // 2 * 2], layout)) for x in (source, rows))
    unit = made / given / (made / given).abs()
    steps = unit[:, 1:] / unit[:, :-1]
    mean = steps.mean((0, 1))
    return mean.angle().abs() if float((steps - mean).abs().amax()) <= 1e-3 else None


def base_of(turns: Tensor) -> float | None:
    """Return the base of which angles `[K / 2]` are the frequencies from 1 on; None where they are of none.

    >>> round(base_of(500.0 ** (-torch.arange(0, 8, 2) / 8)))
    500
    """
    if len(turns) < 2 or abs(float(turns[0]) - 1) > 1e-4 or not bool((turns > 1e-7).all()):
        return None
    steps = turns.double().log().diff()
    if float((steps - steps[0]).abs().amax()) > 1e-3 * float(steps[0].abs()):
        return None
    base = float((-steps.mean() * len(turns)).exp())
    return base if 1 < base < _LARGEST else None


def is_scaled(turns: Tensor, base: float) -> bool:
    """Whether angles are those of a base slowed down: all by a power of two, or the later pairs alone (YaRN, Llama 3).

    Slowed down by any other number, all of them follow an exponent that is wrong by one, say.
    """
    plain = base ** (-torch.arange(len(turns), dtype=torch.float64) / len(turns))
    share = turns.double() / plain
    by_halves = float(share[0].log2())
    falls = bool((share > 1e-4).all() and (share.diff() <= 1e-4).all())
    is_slowed = bool((share < 1 - 1e-4).any())
    return is_slowed and falls and by_halves <= 1e-4 and abs(by_halves - round(by_halves)) <= 1e-4


def is_still(rows: Tensor, sources: list[Head | None], limit: float) -> bool:
    """Whether rows `[B, H, T, K]` are their sources times a factor: nothing is turned."""
    pairs = [(rows[:, h], s.source * s.factor) for h, s in enumerate(sources) if s is not None]
    return bool(pairs) and all(float((a - b).abs().amax()) <= 1e2 * limit * float(b.abs().amax()) for a, b in pairs)


def stands_still(attention: Attention, limit: float) -> bool:
    """Whether neither queries nor keys are turned."""
    both = ((attention.query, attention.query_from), (attention.key, attention.key_from))
    return all(is_still(rows, sources, limit) for rows, sources in both)


def goes_on_as_it_is(seen: Traced, attention: Attention, head: int) -> bool:
    """Whether a map takes what a head gives as it stands: turned back first, turned values are right."""
    output = attention.weights[:, head] @ attention.value[:, head]
    _, length, width = output.shape
    later = [p for p in seen.products if p.when > attention.when]
    for product in later[:_NEXT]:
        for parts in parts_of(product.left.cpu().double(), seen.batch, length, width):
            heads = (parts.part(number, width)[0] for number in range(len(parts.sizes)))
            if any(float((h - output).abs().amax()) <= 1e2 * seen.limit * float(output.abs().amax()) for h in heads):
                return True
    return False
