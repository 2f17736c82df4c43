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
        earlier: names and values of tensors already defined, of the same shape.
        device: where the tensor is to live.

    Returns:
        One expression; for a change, an expression and pieces that begin with `[index] = `.
    """
    for name, known in reversed(earlier):
        if known.dtype != value.dtype:
            if _is_long(value) and known.is_floating_point() and _are_one(known.to(value.dtype), value):
                return [f"{name}.to({value.dtype})"]
            continue
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
    if pattern := _pattern(value):
        placed = "" if device.type == "cpu" else f".to('{device}')"
        return f"torch.ones{tuple(value.shape)}.{pattern}.to({value.dtype}){placed}"
    if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
        shape = tuple(value.shape)
        return f"torch.full({shape}, {_nested(value.flatten()[0].item(), value.dtype)}, dtype={value.dtype}{where})"
    if _is_long(value) and value.ndim > 1 and len(value) > 1 and _are_one(value, value[:1].expand_as(value)):
        return f"{_numbers(value[:1], device)}.repeat({', '.join(map(str, [len(value), *[1] * (value.ndim - 1)]))})"
    whole = f"torch.tensor({_nested(value.tolist(), value.dtype)}, dtype={value.dtype}{where})"
    if value.dtype == torch.float64 and _are_one(value.float().double(), value):  # nine digits in place of seventeen
        half = f"torch.tensor({_nested(value.float().tolist(), torch.float32)}, dtype=torch.float32{where}).double()"
        return min(whole, half, key=len)
    return whole


def _are_one(some: Tensor, others: Tensor) -> bool:
    """Whether tensors have the same numbers, the sign of a zero too."""
    return torch.equal(some, others) and torch.equal(some.signbit(), others.signbit())


def _is_long(value: Tensor) -> bool:
    """Whether the numbers of a tensor take more room than another way to tell them."""
    return value.numel() > 4 and not value.is_complex()


def _pattern(value: Tensor) -> str:
    """Return how a mask is made of ones: `tril(0)` where a query sees no later key; "" for all else."""
    if value.ndim != 2 or min(value.shape) < 2 or value.is_complex() or not 0 < int((value == 1).sum()) < value.numel():
        return ""
    ones, wanted = torch.ones(value.shape, dtype=torch.float64), value.to(torch.float64)
    reach = range(-value.shape[0], value.shape[1] + 1)
    made = ((name, shift, getattr(ones, name)(shift)) for name in ("tril", "triu") for shift in reach)
    return next((f"{name}({shift})" for name, shift, mask in made if torch.equal(mask, wanted)), "")


def _nested(numbers: Any, dtype: torch.dtype) -> str:
    if isinstance(numbers, list):
        return f"[{', '.join(_nested(n, dtype) for n in numbers)}]"
    if isinstance(numbers, float) and dtype != torch.float64 and math.isfinite(numbers):
        return f"{numbers:.9g}" if numbers else repr(numbers)  # nine digits give every float32 back; -0 would be 0
    return repr(numbers) if isinstance(numbers, complex) else literal(numbers)
