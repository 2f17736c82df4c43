"""A mask hides what it is told to hide, wherever that stands: first, in the middle, last."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.diagnosis.masks.hiding import hiding_cause
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_mask
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import SEQUENCES, Stream, sides
from veriformer.properties.subject.paths import Path

_PLACES = {"right": ("last",), "left": ("first",), "both": ("first", "middle", "last")}


@holds(
    "padding.every-position-hides",
    statement="A position that the mask hides is not seen, and that it is hidden shows wherever it could be seen.",
    formula="f(x', mask_p)_t = f(x, mask_p)_t and f(x, mask_p)_t != f(x, 1)_t for t != p, x' = x but at p",
    source="Vaswani et al. 2017, section 3.2.3: a masked position gets weight 0, and 0 alone is no weight.",
    kinds=SEQUENCES,
    unless=needs_mask("padding"),
    examples_factor=0.4,
    catches=("PM11", "PM14", "PM17", "CM17"),
    asks=("padding_side", "right"),
    in_half=True,
)
def every_position_can_be_hidden(case: Case) -> None:
    """A mask that is taken and not read passes every check of what padding must not do: it does nothing. So one
    position is hidden, the first, one in the middle, the last: outputs elsewhere stay when other content is put there,
    those that could see it change, and a causal model's earlier outputs do not. Eight samples, so that one of them does
    not happen to look away. A model that takes from the mask how long a sequence is hides its end alone: declare
    padding_side='right'.
    """
    stream = Stream(case, case.built(), side=case.choice("stream", sides(case.subject, masked=True)))
    length = case.integer("T", 4, 6)
    x = stream.draw(8, length)
    everything = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    for place in _PLACES[case.subject.fact("padding_side", "both")]:
        _hides(case, stream, x, everything, {"first": 0, "middle": length // 2, "last": length - 1}[place])
    case.witness()


def _hides(case: Case, stream: Stream, x: Tensor, everything: Tensor, place: int) -> None:
    hidden, changed = everything.clone(), x.clone()
    hidden[:, place] = False
    changed[:, place] = stream.other(x)[:, place]
    length = x.shape[1]
    causal = bool(case.subject.fact("causal")) and stream.per_position
    for path in case.modes():
        whole, partly = stream(x, everything, path=path), stream(x, hidden, path=path)
        others = [t for t in range(length) if t != place] if stream.per_position else [0]
        seeing = [t for t in others if t > place] if causal else others
        if case.subject.fact("sparse") and stream.per_position:
            moved = stream(changed, everything, path=path)
            seeing = [t for t in seeing if not torch.equal(moved[:, t], whole[:, t])]  # blocks that do not hold it
        blind = [t for t in others if t < place] if causal else []

        def at(output: Tensor, positions: list[int]) -> Tensor:
            return output[:, positions] if stream.per_position else output

        if seeing:
            case.differs(
                at(partly, seeing),
                at(whole, seeing),
                f"hiding position {place} of {length} under the mask changes no output that could see it",
                cause=lambda path=path: _hides_nothing(stream, x, everything, path),  # type: ignore[misc]
            )
        if blind and not case.subject.fact("prefix"):
            case.close(
                at(partly, blind),
                at(whole, blind),
                f"hiding position {place} of {length} under the mask changes outputs before it",
                cause=lambda: hiding_cause(stream),
            )
        if others:
            case.close(
                at(stream(changed, hidden, path=path), others),
                at(partly, others),
                f"other content at position {place} of {length}, which the mask hides, changes outputs elsewhere",
                cause=lambda: hiding_cause(stream),
                in_single=lambda path=path, others=others: stream.in_single(  # type: ignore[misc]
                    changed, x, hidden, path, (slice(None), others) if stream.per_position else ...
                ),
            )


def _hides_nothing(stream: Stream, x: Tensor, everything: Tensor, path: Path) -> str | None:
    return hiding_cause(stream) or _unread(stream, x, everything, path)


def _unread(stream: Stream, x: Tensor, everything: Tensor, path: Path) -> str | None:
    """Tell a mask that hides nothing at all from one that hides some positions."""
    length = x.shape[1]
    shown = []
    with torch.no_grad():
        whole = stream(x, everything, path=path)
        for place in range(length):
            hidden = everything.clone()
            hidden[:, place] = False
            if not torch.equal(stream(x, hidden, path=path), whole):
                shown.append(place)
    if not shown:
        return "no output changes whichever position is hidden, its own neither: the mask is taken and not read"
    if len(shown) == length:
        return None
    if shown == list(range(shown[0], length)):
        return f"hidden positions show at {shown} of {length} alone: the mask is read for the length of the sequence"
    return f"hidden positions show at {shown} of {length} alone"
