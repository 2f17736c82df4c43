"""Python source for values: short, exact, and readable where the value is small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def literal(value: Any) -> str:
    """Return source that makes `value` again.

    >>> literal((float("inf"), torch.float32, slice(None, 2)))
    "(float('inf'), torch.float32, slice(None, 2, None))"
    """
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device('{value}')"
    if isinstance(value, tuple):
        return f"({', '.join(literal(v) for v in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(literal(v) for v in value)}]"
    if value is Ellipsis:
        return "..."
    return repr(value)


def of_tensor(value: Tensor, earlier: Sequence[tuple[str, Tensor]], device: torch.device) -> str:
    """Return source for a tensor: as a change of an earlier one where that is shorter, else with all its numbers.

    Args:
        value: on the CPU.
        earlier: names and values of tensors already defined, of the same shape and dtype.
        device: where the tensor is to live.

    Returns:
        One expression; for a change, an expression and lines that begin with `[index] = `.
    """
    for name, known in reversed(earlier):
        changed = (known != value) & ~((known != known) & (value != value))
        while changed.ndim > 2:
            changed = changed.any(dim=-1)
        places = changed.nonzero().tolist()
        if not places:
            return f"{name}.clone()"
        if value.ndim >= 2 and len(places) * 2 <= changed.numel():
            lines = [f"[{', '.join(map(str, p))}] = {_numbers(value[tuple(p)], device)}" for p in places]
            return "\n".join([f"{name}.clone()", *lines])
    return _numbers(value, device)


def _numbers(value: Tensor, device: torch.device) -> str:
    where = "" if device.type == "cpu" else f", device='{device}'"
    if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
        shape = tuple(value.shape)
        return f"torch.full({shape}, {literal(value.flatten()[0].item())}, dtype={value.dtype}{where})"
    return f"torch.tensor({_nested(value.tolist(), value.dtype)}, dtype={value.dtype}{where})"


def _nested(numbers: Any, dtype: torch.dtype) -> str:
    if isinstance(numbers, list):
        return f"[{', '.join(_nested(n, dtype) for n in numbers)}]"
    if isinstance(numbers, float) and dtype != torch.float64 and math.isfinite(numbers):
        return f"{numbers:.9g}"  # nine digits give every float32 back
    return literal(numbers)
