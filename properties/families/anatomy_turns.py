"""What is done to queries and keys inside a model where they are not turned by the declared angles."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import Attention
from veriformer.properties.anatomy.rotations import Sides, is_still, rotation_misfit
from veriformer.properties.anatomy.sources import Head
from veriformer.properties.definitions.angles import paired
from veriformer.properties.formulas.moved_rows import positions_told
from veriformer.properties.subject.subject import Subject

_NEAR = 1e-3  # of a unit vector: float32 turns by hundreds of radians


@dataclass(frozen=True)
class Angles:
    """Declared angles: the base, the channels that are turned, and the layout, "" for either."""

    base: float
    width: int
    layout: str

    @classmethod
    def declared(cls, subject: Subject) -> Angles:
        """Return the angles that a subject declares, a width of 0 where it declares none."""
        base, layout = float(subject.fact("base", 10000.0)), str(subject.fact("layout", ""))
        return cls(base, int(subject.fact("rotary_dim", 0)), layout)

    def of_width(self, width: int) -> Angles:
        """Return the same angles, of all channels of a head where no number of them is declared."""
        return replace(self, width=self.width or width)


def turn_cause(
    attention: Attention, own: Angles, place: str, base: float | None, limit: float, d_model: int
) -> str | None:
    """Say what is done to queries and keys instead."""
    if told := _positions_told(attention, own):
        return f"in {place} {told}"
    wide = attention.query.shape[-1]
    if base and own.width < wide and abs(math.log(base) / math.log(own.base) - own.width / wide) < 1e-3:
        return f"in {place} the exponents go by the {wide} channels of a head, not by the {own.width} that are turned"
    if base and own.width < d_model and abs(math.log(base) / math.log(own.base) - own.width / d_model) < 1e-3:
        return f"in {place} the exponents are divided by d_model, {d_model}, not by the {own.width} that are turned"
    if base:
        return f"the angles in {place} are those of base {base:g}"
    still = [is_still(rows, sources, limit) for rows, sources in (
        (attention.query, attention.query_from), (attention.key, attention.key_from))]  # fmt: skip
    if all(still):
        return f"neither queries nor keys are turned in {place}"
    if any(still):
        which, other = ("keys", "queries") if still[0] else ("queries", "keys")
        return f"in {place} {which} are turned and {other} are not"
    for part in (wide // 2, wide // 4, wide):
        if part >= 2 and part != own.width and rotation_misfit(attention, own.base, part, "") < 1e3 * limit:
            return f"{part} of {wide} channels are turned in {place}"
    if own.layout and rotation_misfit(attention, own.base, own.width, "") < 1e3 * limit:
        return f"the channels of a pair in {place} do not stand as declared (layout={own.layout!r})"
    return None


def _positions_told(attention: Attention, own: Angles) -> str | None:
    """Say by which positions queries and keys are turned, where every one is turned by the angles of some position."""
    for layout in [own.layout] if own.layout else ["halves", "interleaved"]:
        queries, keys = (_turned_by(side, own, layout) for side in _sides(attention))
        if queries is None or keys is None:
            continue
        heads = range(len(queries))
        if len(heads) > 1 and all(rows[h] == [h] * len(rows[h]) for rows in (queries, keys) for h in heads):
            return (
                "queries and keys are turned by the number of their head, not by their position: the rotation runs "
                "over the axis of the heads"
            )
        told = {which: _told(rows) for which, rows in (("queries", queries), ("keys", keys))}
        if None in told.values():
            return None
        if told["queries"] == told["keys"]:
            return f"queries and keys {told['queries']}" if told["queries"] else None
        return " and ".join(f"{which} {words or 'are turned rightly'}" for which, words in told.items())
    return None


def _sides(attention: Attention) -> Sides:
    return (attention.query, attention.query_from), (attention.key, attention.key_from)


def _told(heads: list[list[int]]) -> str | None:
    """Say by which positions rows are turned, alike in all heads; "" if rightly, None if it is no one thing."""
    rows = heads[0]
    if any(other != rows for other in heads):
        return None
    if rows == list(range(len(rows))):
        return ""
    times = rows[-1] // max(len(rows) - 1, 1)
    if len(rows) > 2 and times > 1 and rows == [times * t for t in range(len(rows))]:
        return "are turned twice" if times == 2 else f"are turned {times} times"
    if rows == [0] * len(rows):
        return None  # nothing is turned, which is told elsewhere
    return positions_told(rows, 0, "are turned as those of")


def _turned_by(side: tuple[Tensor, list[Head | None]], own: Angles, layout: str) -> list[list[int]] | None:
    """Return the position, by head and row, by whose angles rows are turned; None where one is turned by none."""
    rows, sources = side
    if own.width < 4:
        return None
    length, pairs = rows.shape[2], own.width // 2
    turns = own.base ** (-torch.arange(pairs, dtype=torch.float64) * 2 / own.width)
    known = torch.arange(-length, 2 * length, dtype=torch.float64)
    found = []
    for head, source in enumerate(sources):
        if source is None:
            return None
        given, made = (torch.complex(*paired(x[..., : 2 * pairs], layout)) for x in (source.source, rows[:, head]))
        unit = made / given / (made / given).abs()
        if float((unit - unit[:1]).abs().amax()) > _NEAR:
            return None
        wanted = torch.polar(torch.ones(len(known), pairs, dtype=torch.float64), known[:, None] * turns)
        far, nearest = (unit[0][:, None] - wanted[None]).abs().amax(-1).min(-1)  # of [T, P] and [N, P]
        if float(far.amax()) > _NEAR:
            return None
        found.append([int(known[n]) for n in nearest.tolist()])
    return found
