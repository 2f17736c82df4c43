"""What a model insists on beside its sequence: masks that hide nothing, rows of positions, a cache for each layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from veriformer.properties.adapters.masks.forms import padding_forms
from veriformer.properties.adapters.unknown.arguments import Argument, by_role, hides_where_true
from veriformer.properties.adapters.unknown.wiring import Wiring, all_of, tensors_in


def called(wiring: Wiring, sample: nn.Module, arguments: Sequence[Argument], *inputs: Tensor) -> tuple[Wiring, Any]:
    """Return the call, and what comes of it, with what the model insists on where it refuses to go without.

    Args:
        wiring: the call as its arguments' names tell it.
        sample: a model.
        arguments: of its forward.
        inputs: that it is called on.

    Raises:
        Exception: whatever the plain call raised, where nothing helps.
    """
    try:
        return wiring, wiring.call(sample, *inputs)
    except Exception as problem:
        refusal = problem
    for tried in _ways(wiring, sample, arguments):
        try:
            output = tried.call(sample, *inputs)
        except Exception:
            continue
        if all(bool(t.isfinite().all()) for _, t in tensors_in(output)):  # else a mask hides everything there
            return tried, output
    raise refusal


def _ways(wiring: Wiring, sample: nn.Module, arguments: Sequence[Argument]) -> Iterator[Wiring]:
    kept = [wiring, *_with_caches(wiring, sample, arguments)]
    rows = {n: f"{v}[None]" for n, v in wiring.given.items() if v.startswith("torch.arange(")}
    for one in kept:
        for placed in [one.having(**rows), one] if rows else [one]:
            if placed is not wiring:
                yield placed
            yield from _with_masks(placed, arguments)


def _with_caches(wiring: Wiring, sample: nn.Module, arguments: Sequence[Argument]) -> Iterator[Wiring]:
    """Yield the call with an empty cache for each layer."""
    names = [a.name for a in by_role(arguments, "cache")]
    lists = [path for path, m in sample.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential) and path]
    for path in [p for p in lists if "." not in p][:3] if names else []:
        yield wiring.having(**dict.fromkeys(names, f"[None] * len(model.{path})"))


def _with_masks(wiring: Wiring, arguments: Sequence[Argument]) -> Iterator[Wiring]:
    """Yield the call with masks that hide nothing where they must be given."""
    names = [a.name for a in by_role(arguments, "mask") if a.is_required]
    every = all_of(wiring.inputs[0])
    of_names = [[form for form, _ in padding_forms(every, hidden_first=hides_where_true(n))] for n in names]
    for forms in zip(*of_names, strict=True):
        yield wiring.having(**dict(zip(names, forms, strict=True)))
