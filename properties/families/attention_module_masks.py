"""Keys that a module's padding mask hides: at the end, or anywhere; part of `attention.masked-equals-removed`."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.diagnosis.masks.hiding import hiding_cause
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream
from veriformer.properties.subject.palette import MANY
from veriformer.properties.subject.paths import Path


def masked_keys_of_modules_are_gone(case: Case) -> None:
    """Require that keys under a padding mask may as well not be there; of a long sequence those at its end alone.

    Args:
        case: of a module's attention, to itself or to a memory.
    """
    stream = Stream(case, case.built(), side="source" if case.subject.kind == "cross_attention" else "target")
    length = case.length("T", low=2)
    real = case.integer("real", 1, length - 1)
    is_long = length > MANY
    x = stream.draw(1 if is_long else 2, length)
    x[:, real:] *= case.choice("loud", (1.0, 100.0))
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    mask[:, real:] = False
    for path in case.modes():
        got, short = stream(x, mask, path=path), stream(x[:, :real], path=Path(mode=path.mode))
        case.close(
            got[:, :real] if stream.per_position else got,
            short,
            "masking keys is not the same as deleting them",
            cause=lambda: hiding_cause(stream),
        )
    if is_long:
        case.witness()
        return
    if case.subject.fact("padding_side", "both") == "both" and case.subject.fact("positions") == "none":
        _a_hole_is_no_end(case, stream, stream.draw(2, length))  # none of whose keys is loud
    leaf = x.detach().clone().requires_grad_()
    output = stream(leaf, mask)
    seen = output[:, :real] if stream.per_position else output
    (gradient,) = torch.autograd.grad(seen.square().sum(), leaf)
    case.exact(gradient[:, real:], torch.zeros_like(gradient[:, real:]), "the gradient of a masked key is not 0",
               cause=lambda: hiding_cause(stream))  # fmt: skip
    case.witness()


def _a_hole_is_no_end(case: Case, stream: Stream, x: Tensor) -> None:
    """Hide two keys anywhere, in all samples: without positions, and a window, they may as well not be there."""
    if case.subject.fact("window") or case.subject.fact("sparse"):
        return
    length = x.shape[1]
    hole = case.integer("hole", 0, length - 1)
    holes = sorted({hole, (hole + 2) % length} if length > 3 else {hole})
    others = [s for s in range(length) if s not in holes]
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    mask[:, holes] = False
    got, short = stream(x, mask, path=Path(mask="padding")), stream(x[:, others])
    case.close(
        got[:, others] if stream.per_position else got,
        short,
        f"masking {_keys(holes)} of {length} is not the same as deleting {'them' if len(holes) > 1 else 'it'}",
        cause=lambda: _lost_behind_a_hole(stream, x, mask, others) or hiding_cause(stream),
    )


def _lost_behind_a_hole(stream: Stream, x: Tensor, mask: Tensor, others: list[int]) -> str | None:
    """Name the real keys that no output sees where one before them is hidden."""
    lost = []
    for place in others:
        changed = x.clone()
        changed[:, place] = stream.other(x)[:, place]
        rest = [t for t in others if t != place] if stream.per_position else slice(None)
        is_seen = not torch.equal(stream(changed)[:, rest], stream(x)[:, rest])  # without a mask
        if is_seen and torch.equal(stream(changed, mask)[:, rest], stream(x, mask)[:, rest]):
            lost.append(place)
    if not lost:
        return None
    holes = _keys([s for s in range(x.shape[1]) if s not in others])
    last = lost == others[len(others) - len(lost) :]
    why = ": real positions are counted, and so many are taken from the front, whichever they are" if last else ""
    return f"with {holes} alone hidden no output sees {', '.join(map(str, lost))} of {x.shape[1]}{why}"


def _keys(places: list[int]) -> str:
    return f"key{'s' * (len(places) > 1)} {' and '.join(map(str, places))}"
