"""Numbers of 16 bits inside a forward of float32: rounded on the way, whatever they are widened to afterwards.

This file imports torch alone: its source is pasted into standalone scripts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SeeingWatch(TorchDispatchMode):
    """Sees every operation while it is entered.

    Attributes:
        seen: what was looked for, in words; "" for nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that compiled code need not be kept away."""
        return False


class HalfWatch(SeeingWatch):
    """Notes the first operation of a forward of float32 that gives numbers of 16 bits, while it is entered.

    Constants that 16 bits hold exactly (masks of ones and zeros, their fills) are none: they lose nothing. Positions
    are: as many as fit into a small model are exact, and those of a longer text are not.

    Attributes:
        seen: name of the operation and dtype; "" for none.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.seen and isinstance(result, Tensor) and result.dtype in (torch.bfloat16, torch.float16):
            wide = result.float()
            fills = bool(((wide == 0) | (wide == 1) | (wide.abs() >= 1e4)).all())  # 1, 0 and what hides a score
            if not fills:
                self.seen = f"{func.overloadpacket.__name__} in {str(result.dtype).removeprefix('torch.')}"
        return result


class CountingWatch(SeeingWatch):
    """Notes the first operation that gives positions in 16 bits of which neighbours have become one number.

    bfloat16 holds whole numbers to 256, float16 to 2,048: from there on a count stands still and jumps by turns. Angles
    of the first frequency, 1, are such a count, too.

    Attributes:
        seen: name of the operation, and the first position that is another's number; "" for none.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_half = isinstance(result, Tensor) and result.dtype in (torch.bfloat16, torch.float16)
        if self.seen or not is_half or result.numel() <= 257:
            return result
        counts = result if result.ndim < 2 or result.shape[-1] > 257 else result[..., 0]
        if max(counts.shape, default=0) == counts.numel() > 257:  # one axis alone
            counted = counts.float().flatten()
            steps, moved = counted.diff(), float(counted[-1] - counted[0])
            is_count = bool((counted == counted.round()).all() and ((steps >= 0) & (steps <= 4)).all())
            if is_count and bool((steps == 0).any()) and abs(moved + 1 - len(counted)) <= 2:
                first = int((steps == 0).nonzero()[0]) + 1
                self.seen = f"{func.overloadpacket.__name__} in {str(result.dtype).removeprefix('torch.')}: {first}"
        return result


def counted_in_half(run: Callable[[], object]) -> str:
    """Return where a forward counts positions in 16 bits until neighbours are one number, "" where it does not.

    Args:
        run: calls a model of 16 bits on a sequence of more than 257.
    """
    with CountingWatch() as watch, torch.no_grad():
        run()
    return watch.seen


def half_inside(run: Callable[[], object]) -> str:
    """Return the first operation of a forward of float32 that gives numbers of 16 bits, "" where none does.

    Args:
        run: calls a model of float32 outside of autocast.
    """
    with HalfWatch() as watch, torch.no_grad():
        run()
    return watch.seen
