"""Python source for values: short, exact, and readable where the value is small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from veriformer.properties.counterexamples.program import UnwritableError
from veriformer.properties.subject.sizes import DrawnConfig

_PLAIN = (bool, int, str, bytes, range, type(None), torch.dtype, torch.memory_format, torch.layout)


def literal(value: Any) -> str:
    """Return source that makes a value that is no tensor and no container again.

    >>> literal(float("inf")), literal(torch.float32), literal(slice(None, 2))
    ("float('inf')", 'torch.float32', 'slice(None, 2, None)')

    Raises:
        UnwritableError: it is an object that has no such source.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float.__repr__(value) if math.isfinite(value) else f"float('{value}')"
    if isinstance(value, torch.device):
        return f"torch.device('{value}')"
    if isinstance(value, DrawnConfig):
        sizes = ", ".join(f"{k}={v!r}" for k, v in asdict(value).items())
        return f"types.SimpleNamespace({sizes}, d_head={value.d_head})"
    if isinstance(value, slice):
        return f"slice({literal(value.start)}, {literal(value.stop)}, {literal(value.step)})"
    if value is Ellipsis:
        return "..."
    if isinstance(value, _PLAIN):
        return repr(value)
    raise UnwritableError(f"an object of {type(value).__module__}.{type(value).__qualname__}")


def of_tensor(value: Tensor, earlier: Sequence[tuple[str, Tensor]], device: torch.device) -> list[str]:
    """Return source for a tensor: as a change of an earlier one where that is shorter, else with all its numbers.

    Args:
        value: on the CPU.
        earlier: names and values of tensors already defined, of the same shape and dtype.
        device: where the tensor is to live.

    Returns:
        One expression; for a change, an expression and pieces that begin with `[index] = `.
    """
    for name, known in reversed(earlier):
        changed = (known != value) & ~((known != known) & (value != value))
        while changed.ndim > 2:
            changed = changed.any(dim=-1)
        places = changed.nonzero().tolist()
        if not places:
            return [f"{name}.clone()"]
        if value.ndim >= 2 and len(places) * 2 <= changed.numel():
            changes = [f"[{', '.join(map(str, p))}] = {_numbers(value[tuple(p)], device)}" for p in places]
            return [f"{name}.clone()", *changes]
    return [_numbers(value, device)]


def _numbers(value: Tensor, device: torch.device) -> str:
    where = "" if device.type == "cpu" else f", device='{device}'"
    if not value.numel():
        return f"torch.empty({tuple(value.shape)}, dtype={value.dtype}{where})"
    if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
        shape = tuple(value.shape)
        return f"torch.full({shape}, {_nested(value.flatten()[0].item(), value.dtype)}, dtype={value.dtype}{where})"
    return f"torch.tensor({_nested(value.tolist(), value.dtype)}, dtype={value.dtype}{where})"


def _nested(numbers: Any, dtype: torch.dtype) -> str:
    if isinstance(numbers, list):
        return f"[{', '.join(_nested(n, dtype) for n in numbers)}]"
    if isinstance(numbers, float) and dtype != torch.float64 and math.isfinite(numbers):
        return f"{numbers:.9g}"  # nine digits give every float32 back
    return repr(numbers) if isinstance(numbers, complex) else literal(numbers)
