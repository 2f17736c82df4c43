"""Does a model that is moved to float64 really compute in it? Watches every operation for narrower results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NarrowingWatch(TorchDispatchMode):
    """Notes whether any operation turns float64 numbers into narrower ones while it is entered.

    Many libraries compute a softmax or a norm in float32 whatever the dtype of the model: right, but then two
    evaluation orders differ by float32 rounding, and float64 tolerances would cry wolf. Narrow constants that are
    made on the way (a mask from `torch.ones`) are the same in every evaluation and do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_narrow = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        takes_wide = any(isinstance(v, Tensor) and v.dtype == torch.float64 for v in tree_leaves((args, kwargs)))
        gives_narrow = any(
            isinstance(v, Tensor) and v.is_floating_point() and v.dtype != torch.float64 for v in tree_leaves(result)
        )
        self.is_narrow |= takes_wide and gives_narrow
        return result
