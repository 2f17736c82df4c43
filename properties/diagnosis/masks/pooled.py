"""How a classifier pools under a mask: the weights of its positions, solved for from what goes in and comes out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked
from veriformer.properties.causes.tracing.lines import Step, Trace
from veriformer.properties.diagnosis.masks.masked import Masked

_LENGTH, _REAL = 6, 4  # fewer than there are channels
_SAMPLES = 7  # no length; a maximum over zeros shows where all real states are negative


def pooled_cause(masked: Masked) -> str | None:
    """Say how padding enters a pooled vector, from the states before it; None where it does not, or does not show."""
    for side in ("right", "left"):
        if masked.side in (side, "both") and (told := _padded_on(masked, side) or _read_out(masked, side)):
            return told
    return _looked_up(masked) if masked.side in ("left", "both") else None


def _read_out(masked: Masked, side: str) -> str | None:
    """Tell which position's outputs are given out, where a model computes them for all and takes those of one."""
    counts = [4, 2, 3]
    x = masked.distinct(len(counts), _LENGTH)
    built, every = masked.clean(), list[Tensor]()
    if not isinstance(built.module, nn.Module):
        return None

    def note(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 3 and output.shape[:2] == x.shape[:2]:
            every.append(output.detach())

    hooks = (part.register_forward_hook(note) for part in built.module.modules() if part is not built.module)
    with hooked(hooks), Trace() as trace:
        given = masked(x, masked.padded(x, counts, side), built)
    picked = [(one, step.outputs[0]) for step in trace.steps for one in step.inputs if _is_picked(one, step, x.shape)]
    for states, given in [*reversed(picked), *((states, given) for states in reversed(every))]:
        if states.shape[-1] != given.shape[-1]:
            continue
        same = ((states - given[:, None]).abs().amax(-1) <= masked.limit(given)).nonzero().tolist()
        taken = [place for _, place in same]
        if [sample for sample, _ in same] != list(range(len(counts))):
            continue
        first = [_LENGTH - n if side == "left" else 0 for n in counts]
        last = [_LENGTH - 1 if side == "left" else n - 1 for n in counts]
        if taken in (first, last) or taken == [0] * len(counts):
            return None
        rule = "number of real ones - 1" if taken == [n - 1 for n in counts] else "last place of the padded sequence"
        is_rule = taken in ([n - 1 for n in counts], [_LENGTH - 1] * len(counts))
        how = f", the {rule}" if is_rule else ""
        if taken == [n + 1 for n in last]:
            how = ", one behind the last real one"
        return (
            f"padded on the {side} to {_LENGTH}, samples of {counts} real positions are read at {taken}{how}: "
            f"their last real ones are {last}"
        )
    return None


def _is_picked(states: Tensor, step: Step, shape: torch.Size) -> bool:
    """Whether an operation takes one position of each sample, `[B, D]`, from states `[B, T, D]`."""
    rows = step.outputs[0]
    return states.ndim == 3 and states.shape[:2] == shape[:2] and rows.shape == (states.shape[0], states.shape[2])


def _looked_up(masked: Masked) -> str | None:
    """Tell whether behind left padding the position number (real ones - 1) is read, by what moves the output."""
    x = masked.distinct(1, _LENGTH)
    for real in (2, 3, 4):
        mask = masked.padded(x, [real], "left")
        seen, hidden = _moving(masked, x, mask), (~mask[0]).nonzero().flatten().tolist()
        top = max(seen, default=-1) if _LENGTH - 1 not in seen else max((s for s in seen if s in hidden), default=-1)
        if top != real - 1:
            return None
    return (
        "padded on the left, the output depends on position (number of real ones - 1) and on no later one, or on that "
        "alone of the padded: the last real position is looked up at that place, which is right for right padding alone"
    )


def _moving(masked: Masked, x: Tensor, mask: Tensor) -> list[int]:
    """Return the positions whose content moves the output of one sample."""
    return [s for s, moves in enumerate(masked.is_seen(x, mask)) if moves]


def _padded_on(masked: Masked, side: str) -> str | None:
    x = masked.distinct(_SAMPLES, _LENGTH)
    mask = masked.padded(x, [_REAL] * _SAMPLES, side)
    found = pooling_of(masked, x, mask)
    if found is None:
        return None
    for states in found[0]:
        for own, pooled in zip(states, found[1], strict=True):
            if told := _of_weights(own, pooled, mask[0].cpu(), side):
                return told
    alone = masked.padded(x, [1] * _SAMPLES, side)  # of one state about half of the channels are negative
    found = pooling_of(masked, x, alone)
    for states in found[0][:1] if found else []:
        for own, pooled in zip(states, found[1] if found else states, strict=True):
            real = torch.cat([torch.ones(len(own) - _LENGTH, dtype=torch.bool), alone[0].cpu()])
            if _weights(own, pooled) is None and (told := _largest(own, pooled, real)):
                return told
    return None


def _of_weights(states: Tensor, pooled: Tensor, mask: Tensor, side: str) -> str | None:
    real = torch.cat([torch.ones(len(states) - len(mask), dtype=torch.bool), mask])  # a token put in front
    many, weights = len(real), _weights(states, pooled)
    if weights is None:
        return _largest(states, pooled, real)
    near = 1e-4
    hidden, places = weights[~real], real.nonzero().flatten()
    if float((weights - 1 / many).abs().max()) < near:
        return f"the pooling is the mean over all {many} positions, the {_LENGTH - _REAL} padded ones included"
    if float((weights[real] - 1 / many).abs().max()) < near:
        return (
            f"the pooling sums the {_REAL} real positions and divides by {many}, the padded length, instead of by "
            "their number"
        )
    top = int(weights.argmax())
    if _one(weights) is not None:
        what = "a real one" if bool(real[top]) else "which is padding"
        first, last = int(places[0]), int(places[-1])
        if top in (first, last):
            return None
        looked_up = " (it is looked up at the number of real ones - 1)" if top == _REAL - 1 else ""
        return (
            f"with {_REAL} real positions of {many}, padded on the {side}, the pooling takes position {top}, {what}: "
            f"the last real one is {last}{looked_up}"
        )
    if float(hidden.abs().max()) < near:
        return None
    if float(weights.min()) < -near or float(hidden.sum()) > 1 + near:  # no weights: another use is made of them
        return (
            f"what the {_LENGTH - _REAL} padded positions hold reaches the pooled output in the pooling, and not "
            "by a weight of theirs: they are counted in something that it is made from (a mean or a deviation over all "
            "positions that the weights come from, say)"
        )
    told = f"the pooling gives the {_LENGTH - _REAL} padded positions {float(hidden.sum()):.2g} of its weight"
    if float(hidden.std()) < near and float(weights[real].std()) > 10 * near:
        told += ", each the same whatever stands there: their score is a constant, not -inf, before the softmax"
    return told


def weights_of_places(masked: Masked, real: int) -> list[Tensor]:
    """Return by which weights a pooled vector is made of states, `[N, T]`, the same for all of some samples.

    Args:
        masked: a classifier that pools.
        real: how many of the positions are real, the first ones.

    Returns:
        One row of weights for each module whose states explain the vector, the last module first; empty where none do.
    """
    x = masked.distinct(_SAMPLES, _LENGTH)
    found = pooling_of(masked, x, masked.padded(x, [real] * _SAMPLES, "right"))
    rows = []
    for states in found[0] if found else ():
        weights = [_weights(own, pooled) for own, pooled in zip(states, found[1] if found else states, strict=True)]
        known = [w for w in weights if w is not None]
        if len(known) == len(weights) and float((torch.stack(known) - known[0]).abs().max()) < 1e-4:
            rows.append(known[0])
    return rows


def pooled_for_others(masked: Masked) -> str | None:
    """Tell whether all samples of a batch are read where one of them ends."""
    x = masked.distinct(3, _LENGTH)
    for side in ("right", "left"):
        if masked.side not in (side, "both"):
            continue
        counts = [4, 6, 2]
        mask = masked.padded(x, counts, side)
        found = pooling_of(masked, x, mask)
        for states in found[0] if found else ():
            if found is None or states.shape[1] != _LENGTH:
                continue
            picked = [_one(_weights(own, out)) for own, out in zip(states, found[1], strict=True)]
            if None in picked:
                continue
            last = [int(row.nonzero().max()) for row in mask.cpu()]
            if len(set(picked)) == 1 and len(set(last)) > 1 and picked[0] == last[0]:
                return (
                    f"in a batch of samples that end at {last} the pooling takes position {picked[0]} of each: that of "
                    "the first sample is used for all"
                )
    return None


def ends_of_others(masked: Masked) -> str | None:
    """Tell by what moves each output whether all samples of a batch are read where the first one ends."""
    if masked.side == "left":
        return None
    x = masked.distinct(3, _LENGTH)
    mask = masked.padded(x, [4, 6, 2], "right")
    before = masked(x, mask)
    tops = []
    for b in range(len(x)):
        moved = []
        for place in range(_LENGTH):
            changed = x.clone()
            changed[b, place] = masked.stream.other(x)[b, place]
            if bool(masked.moved(masked(changed, mask), before)[b]):
                moved.append(place)
        tops.append(max(moved, default=-1))
        if b and max(_moving(masked, x[b : b + 1], mask[b : b + 1]), default=-1) != int(mask[b].sum()) - 1:
            return None
    hidden = mask[2].cpu()
    if tops[:2] == [3, 3] and (tops[2] == 3 or bool(hidden[tops[2]])):
        return (
            f"in a batch of samples that end at [3, 5, 1] the outputs depend on nothing behind {tops}, alone on all "
            "up to their own ends: the end of the first sample is used for all"
        )
    return None


def _one(weights: Tensor | None) -> int | None:
    if weights is None:
        return None
    top = int(weights.argmax())
    alone = torch.nn.functional.one_hot(torch.tensor(top), len(weights))
    return top if float((weights - alone).abs().max()) < 1e-4 else None


def _weights(states: Tensor, pooled: Tensor) -> Tensor | None:
    """Solve `pooled = weights states`; None where no weights fit, or more than one choice does."""
    if states.shape[0] > states.shape[1]:
        return None
    solved = torch.linalg.lstsq(states.T, pooled[:, None]).solution[:, 0]
    fits = (solved @ states - pooled).abs().max() <= 1e-5 * states.abs().max()
    return solved if bool(fits) and torch.linalg.matrix_rank(states) == len(states) else None


def _largest(states: Tensor, pooled: Tensor, real: Tensor) -> str | None:
    """Tell what a maximum runs over."""
    near = 1e-5 * float(states.abs().max())
    right = states[real].amax(0)
    if float((pooled - right).abs().max()) <= near:
        return None
    if float((pooled - right.clamp(min=0)).abs().max()) <= near:
        return (
            "the pooled maximum is max(0, that of the real positions): padded states are set to 0 instead of -inf "
            "before the maximum"
        )
    if float((pooled - states.amax(0)).abs().max()) <= near:
        return "the pooling takes the maximum over all positions, padded ones included"
    return None


def pooling_of(masked: Masked, x: Tensor, mask: Tensor) -> tuple[list[Tensor], Tensor] | None:
    """Return the states `[B, T, D]` that modules gave, the last first, and the vectors `[B, D]` made of them."""
    built = masked.clean()
    if not isinstance(built.module, nn.Module):
        return None
    states: list[Tensor] = []
    pooled: list[Tensor] = []

    def before(_: nn.Module, args: Any) -> None:
        given = [v for v in args if isinstance(v, Tensor) and v.is_floating_point() and v.ndim == 2]
        pooled.extend(v.detach().double().cpu() for v in given if len(v) == len(x) and states)

    def after(_: nn.Module, __: Any, output: Any) -> None:
        fits = isinstance(output, Tensor) and output.ndim == 3 and len(output) == len(x) and not pooled
        if fits and output.shape[1] in (x.shape[1], x.shape[1] + 1) and output.shape[2] == masked.built.config.d_model:
            states.append(output.detach().double().cpu())

    parts = [part for part in built.module.modules() if part is not built.module]
    hooks = [part.register_forward_pre_hook(before) for part in parts]
    hooks += [part.register_forward_hook(after) for part in parts]
    with hooked(hooks):
        masked(x, mask, built)
    fitting = [own for own in reversed(states) if pooled and own.shape[2] == pooled[0].shape[1]][:4]
    return (fitting, pooled[0]) if fitting else _pooled_by_hand(masked, x, mask)


def _pooled_by_hand(masked: Masked, x: Tensor, mask: Tensor) -> tuple[list[Tensor], Tensor] | None:
    """Return the same of operations that stand between modules, or in none."""
    states: list[Tensor] = []
    with Trace() as trace:
        masked(x, mask)
    for step in trace.steps:
        made = step.outputs[0] if step.outputs else None
        if not isinstance(made, Tensor) or not made.is_floating_point() or not made.ndim or len(made) != len(x):
            continue
        if made.ndim == 3 and made.shape[1] in (x.shape[1], x.shape[1] + 1):
            states.append(made.detach().double().cpu())
        elif made.ndim == 2 and (fitting := [own for own in reversed(states) if own.shape[2] == made.shape[1]][:4]):
            return fitting, made.detach().double().cpu()
    return None
