"""Watches of every operation of a forward: does it compute in float64, does it pick by the size of numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DispatchWatch(TorchDispatchMode):
    """Sees every operation while it is entered, and leaves torch's compiler alone."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that compiled code need not be kept away: else torch imports its compiler first, 800 modules of it."""
        return False


class NarrowingWatch(DispatchWatch):
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


_CHOICES = ("topk", "argmax", "argmin", "sort", "argsort")


class ChoiceWatch(DispatchWatch):
    """Notes whether any operation picks among computed numbers while it is entered: experts of a token, say.

    A pick between two nearly equal numbers may fall either way under rounding, and the output is another one then. In
    half precision that happens in one of some hundred tokens, so no claim about such an output can be made there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_chosen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _CHOICES and isinstance(args[0], Tensor) and args[0].is_floating_point():
            self.has_chosen = True
        return func(*args, **(kwargs or {}))
