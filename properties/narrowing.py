"""Does a model that is moved to float64 really compute in it? Watches every operation for narrower results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NarrowingWatch(TorchDispatchMode):
    """Notes whether any operation gives floating point numbers narrower than float64 while it is entered.

    Many libraries compute a softmax, a norm or the angles of positions in float32 whatever the dtype of the model:
    right, but then two evaluation orders differ by float32 rounding, and float64 tolerances would cry wolf.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_narrow = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
                self.is_narrow = True
        return result
