"""Models with queries of their own (DETR, Perceiver): they give as many rows, however long a sequence is."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.unknown.arguments import Argument
from veriformer.properties.adapters.unknown.understanding import Understood, basis, first_axis_is_time, unknown
from veriformer.properties.adapters.unknown.wiring import Wiring, tensors_in
from veriformer.properties.subject.sizes import DrawnConfig

_LENGTHS = (5, 8, 13)
_BATCHES = (3, 4)


def of_own_queries(sample: nn.Module, sizes: DrawnConfig, arguments: Sequence[Argument]) -> Understood | None:
    """Return the call of a model of which all lengths of one sequence give rows `[B, Q, *]`, Q its own; None of others.

    All that it gives is judged as one vector a sample, as of a classifier.
    """
    given = basis(arguments, "x", sample)
    if unknown(arguments, given):
        return None
    for is_turned in (False, True):
        plain = Wiring(("x",), given)
        wiring = first_axis_is_time(plain) if is_turned else plain
        wiring = Wiring(("x",), wiring.given)
        for what in ("embeddings", "tokens"):
            axes = _axes_of_samples(sample, sizes, wiring, what)
            if not axes:
                continue
            parts = ", ".join(
                f"made{where}" + (f".movedim({axis}, 0)" if axis else "") + ".flatten(1)" for where, axis in axes
            )
            around = f"(lambda made: torch.cat([{parts}], 1))"
            told = [f"it gives as many rows for a sequence of any length, {', '.join(f'output{w}' for w, _ in axes)}: "
                    "judged as one vector a sample, as of a classifier"]  # fmt: skip
            told += ["its first axis is time: by how many rows it gives"] if is_turned else []
            places = [a.name for a in arguments[1:] if not a.is_required and re.fullmatch(r"pos\w*", a.name.lower())]
            told += [f"{places[0]} is not given: judged as of a set"] if places else []
            return Understood(
                "classifier", Wiring(("x",), wiring.given, around=around), what, (), tuple(told),
                declares={"positions": "none"} if places else {},
            )  # fmt: skip
    return None


def _axes_of_samples(sample: nn.Module, sizes: DrawnConfig, wiring: Wiring, what: str) -> list[tuple[str, int]]:
    """Return which tensors come out, each with the axis of the samples; none where a length changes their shape."""
    shapes: list[dict[str, tuple[int, ...]]] = []
    for batch, length in [(_BATCHES[0], n) for n in _LENGTHS] + [(_BATCHES[1], _LENGTHS[0])]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(1, max(sizes.vocab_size, 2), (batch, length), generator=generator)
        if what == "embeddings":
            x = torch.randn(batch, length, sizes.d_model, generator=generator)
        try:
            output = wiring.call(sample, x)
        except Exception:
            return []
        shapes.append({where: tuple(t.shape) for where, t in tensors_in(output) if _is_one(t)})
    first, *others, wider = shapes
    if not first or any(other != first for other in others) or wider.keys() != first.keys():
        return []
    found = []
    for where, shape in first.items():
        changed = [axis for axis, size in enumerate(shape) if wider[where][axis : axis + 1] != (size,)]
        if len(changed) != 1 or (shape[changed[0]], wider[where][changed[0]]) != _BATCHES:
            return []
        found.append((where, changed[0]))
    return found if any(len(shape) > 2 for shape in first.values()) else []


def _is_one(output: Tensor) -> bool:
    return output.is_floating_point() and output.ndim > 1
