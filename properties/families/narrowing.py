"""Numbers of 16 bits inside a forward of float32: rounded on the way, whatever they are widened to afterwards.

This file imports torch alone: its source is pasted into standalone scripts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class HalfWatch(TorchDispatchMode):
    """Notes the first operation of a forward of float32 that gives numbers of 16 bits, while it is entered.

    Constants that 16 bits hold exactly (masks of ones and zeros, their fills) are none: they lose nothing. Positions
    are: as many as fit into a small model are exact, and those of a longer text are not.

    Attributes:
        seen: name of the operation and dtype; "" for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that compiled code need not be kept away."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.seen and isinstance(result, Tensor) and result.dtype in (torch.bfloat16, torch.float16):
            wide = result.float()
            fills = bool(((wide == 0) | (wide == 1) | (wide.abs() >= 1e4)).all())  # 1, 0 and what hides a score
            if not fills:
                self.seen = f"{func.overloadpacket.__name__} in {str(result.dtype).removeprefix('torch.')}"
        return result


def half_inside(run: Callable[[], object]) -> str:
    """Return the first operation of a forward of float32 that gives numbers of 16 bits, "" where none does.

    Args:
        run: calls a model of float32 outside of autocast.
    """
    with HalfWatch() as watch, torch.no_grad():
        run()
    return watch.seen
