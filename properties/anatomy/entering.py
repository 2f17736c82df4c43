"""What enters the first layer of a model: embeddings, by what they are multiplied, what positions add to them."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.traced import Traced, Value
from veriformer.properties.definitions.sinusoids import closed_form

SINES_SHOW = 24
"""Positions among which sines and cosines are told from any other curve."""

_FAST, _MOVES, _OFF = 1.99, 1e-2, 2e-3
"""2 cos(w) of what turns at all within them; the step that is told from rounding; what is no sinusoid."""


def embedding_factor(seen: Traced) -> tuple[float, str] | None:
    """Return by what the rows of the table of tokens are multiplied, and who looks them up; None if that is not seen.

    What is added, by position or as one row for all, is the same in every sample: it is left out with their mean.
    """
    looked_up = next((v for v in seen.values if v.name == "embedding" and _by_sample(v, seen.batch) is not None), None)
    if looked_up is None:
        return None
    rows = _by_sample(looked_up, seen.batch)
    assert rows is not None
    if any(v.name in ("mul", "div") and v.output.ndim == 2 for v in seen.values[: looked_up.when]):
        return None  # a table that is multiplied before it is looked up: by what is not seen
    factor = None
    for value in seen.values[looked_up.when : _first_map(seen, rows.shape[1])]:
        own = _by_sample(value, seen.batch)
        if value.name in ("embedding", "mul", "add", "div") and own is not None and own.shape == rows.shape:
            scale = float((own * rows).sum() / rows.square().sum())
            if float((own - scale * rows).abs().amax()) <= seen.limit * float(own.abs().amax()):
                factor = scale
    return None if factor is None else (factor, looked_up.place)


def _by_sample(value: Value, batch: int) -> Tensor | None:
    """Return `[B, T, D]` of what differs between the samples, less its mean over them; None if nothing does."""
    x = value.output.double()
    if x.ndim != 3 or batch not in x.shape[:2]:
        return None
    x = x if x.shape[0] == batch else x.transpose(0, 1)
    own = x - x.mean(0)
    return own if float(own.abs().amax()) > 1e-9 * float(x.abs().amax()) else None


def _first_map(seen: Traced, length: int) -> int:
    """Return the number of the first product over a sequence of so many tokens."""
    rows = (length, seen.batch * length)
    return min((p.when for p in seen.products if p.left.shape[-2] in rows), default=len(seen.values))


def position_steps(seen: Traced, length: int, width: int) -> list[Tensor]:
    """Return `[T, D]`: by how much the first sums differ from their first position, where that is the position's doing.

    Args:
        seen: the trace of a forward on the same token at every position of a sample.
        length: T.
        width: D.
    """
    found: list[Tensor] = []
    for value in seen.values[: _first_map(seen, length)]:
        x = value.output.double()
        if value.name != "add" or x.ndim != 3 or x.shape[-1] != width or length not in x.shape[:2]:
            continue
        x = x if x.shape[1] == length else x.transpose(0, 1)
        steps = x - x[:, :1]
        if float((steps - steps[:1]).abs().amax()) <= 1e-4 * float(x.abs().amax()) and bool(steps.abs().amax() > 1e-6):
            found.append(steps[0])
    return found


def sinusoid_misfit(steps: Tensor, width: int, base: float, layout: str) -> float:
    """Return how far steps `[T, D]` are from those of the sinusoidal table, weighed or not, from position 0, 1 or 2 on.

    Of an odd width the last channel may be a zero behind the table of one channel less, as in tensor2tensor.

    Args:
        steps: of `position_steps`.
        width: D.
        base: of the wavelengths.
        layout: "interleaved", "halves" or "" for the nearer one.
    """
    half = torch.arange(width // 2, dtype=torch.float64)
    spread = base ** (-half / max(width // 2 - 1, 1))  # tensor2tensor's run to the base itself
    errors = []
    for arrangement, first in product([layout] if layout else ["interleaved", "halves"], (0, 1, 2)):
        angles = torch.arange(first, len(steps) + first, dtype=torch.float64)[:, None] * spread
        both = (angles.sin(), angles.cos())
        other = torch.cat(both, -1) if arrangement == "halves" else torch.stack(both, -1).flatten(1)
        for table in (closed_form(len(steps), width, base, arrangement, first), other):
            if table.shape == steps.shape:
                wanted = table - table[:1]
                scale = float((wanted * steps).sum() / wanted.square().sum())
                errors.append(float((steps - (scale or 1.0) * wanted).abs().amax()))
    if width % 2 and width > 1 and not bool(steps[:, -1].abs().amax() > 1e-6 * steps.abs().amax()):
        errors.append(sinusoid_misfit(steps[:, :-1], width - 1, base, layout))
    return min(errors)


def is_made_of_sines(added: Tensor) -> bool:
    """Whether each channel is a sinusoid of the position, and a constant: s_(t+1) + s_(t-1) = 2 cos(w) s_t of steps s.

    Args:
        added: `[T, D]`, what enters at each position where every token is the same one.
    """
    steps = added.detach().double().cpu().diff(dim=0)
    if len(steps) < SINES_SHOW - 1:
        return False
    steps = steps[:, steps.abs().amax(0) > _MOVES]
    around, own = steps[2:] + steps[:-2], steps[1:-1]
    turn = (around * own).sum(0) / own.square().sum(0)
    rest = (around - turn * own).abs().amax(0) / steps.abs().amax(0)
    return steps.shape[1] > 1 and int((turn < _FAST).sum()) > 1 and bool((rest < _OFF).all())


def first_rows(
    seen: Traced, module: nn.Module, length: int, width: int, told: int | None = None
) -> list[tuple[int, str]]:
    """Return the row of a table of parameters that stands at the first position, and the table's name.

    Args:
        seen: the trace of a forward on the same token at every position of a sample.
        module: the model.
        length: T.
        width: D.
        told: positions by which a table is known; None: all of them.
    """
    found = []
    for whole in position_steps(seen, length, width):
        steps = whole[:told]
        for name, parameter in module.named_parameters():
            if parameter.shape[-1] != width or parameter.numel() < len(steps) * width:
                continue
            table = parameter.detach().cpu().double().reshape(-1, width)
            bound = seen.limit * float(table.abs().amax())
            # one difference of neighbours leaves few rows to be compared
            near = (table[1:] - table[:-1] - steps[1]).abs().amax(-1) <= bound
            for first in (int(i) for i in near.nonzero().flatten() if i + len(steps) <= len(table)):
                rows = table[first : first + len(steps)]
                if float((rows - rows[:1] - steps).abs().amax()) <= bound:
                    found.append((first, name))
    return found
