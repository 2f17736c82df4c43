"""Watches of every operation of a forward: does it compute in float64, what is narrower there, does it pick by size."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
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


class CostWatch(DispatchWatch):
    """Notes what a call costs, whatever the machine.

    Attributes:
        calls: number of operations.
        largest: entries of the largest tensor that one of them gave.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [v.numel() for v in tree_leaves(result) if isinstance(v, Tensor)]
        self.calls += 1
        self.largest = max(self.largest, *sizes, 0)
        return result


_CALL, _LINE = 5e4, 1e4
"""Multiplications in the time of one operation of torch on small tensors, and of one line of Python, as far as these
can be compared: 5 and 1 microseconds at ten a nanosecond."""

_NOT_COUNTED = (str(Path(torch.__file__).parent), __file__)


class WorkWatch(CostWatch):
    """Notes operations, and lines of Python outside of torch: a loop over numbers is seen though it calls no operation.

    Attributes:
        lines: that were run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines = 0

    @property
    def work(self) -> float:
        """What a call costs beside arithmetic on large tensors, in multiplications: whatever else the machine does."""
        return _CALL * self.calls + _LINE * self.lines

    def __enter__(self) -> WorkWatch:
        self._traced = sys.gettrace()
        super().__enter__()
        sys.settrace(self._enters)
        return self

    def __exit__(self, *given: Any) -> None:
        sys.settrace(self._traced)
        super().__exit__(*given)

    def _enters(self, frame: FrameType, event: str, arg: Any) -> Any:
        return None if frame.f_code.co_filename.startswith(_NOT_COUNTED) else self._runs

    def _runs(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.lines += event == "line"
        return self._runs


class NarrowingWatch(DispatchWatch):
    """Notes whether any operation turns float64 numbers into narrower ones while it is entered.

    Many libraries compute a softmax or a norm in float32 whatever the dtype of the model: right, but then two
    evaluation orders differ by float32 rounding, and float64 tolerances would cry wolf. Narrow constants that are
    made on the way (a table, a scale) are the same in every evaluation: they are noted apart, since a closed form that
    has them in float64 differs by their rounding.

    Attributes:
        is_narrow: whether float64 numbers became narrower ones.
        has_narrow_constants: whether narrower numbers that are rounded ones entered where float64 is computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_narrow = False
        self.has_narrow_constants = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor) and v.is_floating_point()]
        made = [v for v in tree_leaves(result) if isinstance(v, Tensor) and v.is_floating_point()]
        takes_wide = any(v.dtype == torch.float64 for v in given)
        self.is_narrow |= takes_wide and any(v.dtype != torch.float64 for v in made)
        if not self.has_narrow_constants and any(v.dtype == torch.float64 for v in made):
            self.has_narrow_constants = any(v.dtype != torch.float64 and is_rounded(v) for v in given)
        return result


_SHORT_BITS = 12


def is_rounded(value: Tensor) -> bool:
    """Whether some entry must be taken for the rounding of another number to 24 bits or fewer.

    Integers (masks, their fills, positions) and numbers of at most 12 bits (a half, 2^-k) are what they are meant to
    be. A rounded number looks like one of these once in 2^12.

    >>> is_rounded(torch.tensor([0.5, -1e9, 0.0, -torch.inf])), is_rounded(torch.tensor([0.1]))
    (False, True)
    """
    wide = value.detach().double()
    wide = wide[wide.isfinite()]
    mantissa = torch.frexp(wide).mantissa * 2**_SHORT_BITS
    return bool(((wide != wide.round()) & (mantissa != mantissa.round())).any())


def is_widened(value: Tensor) -> bool:
    """Whether float64 numbers are rounded ones of float32: a table that was made there and converted."""
    narrow = value.detach().float()
    return bool((narrow.double() == value)[value.isfinite()].all()) and is_rounded(narrow)


_ROUNDINGS = ("round", "floor", "ceil", "trunc", "sign", "fake_quantize")


class RoundingWatch(DispatchWatch):
    """Notes every operation that turns numbers into steps while it is entered: quantisation.

    Attributes:
        seen: its name and the sum of what it got.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = next((v for v in args if isinstance(v, Tensor)), None)
        if given is not None and given.is_floating_point() and name.startswith(_ROUNDINGS):
            self.seen.append((name, float(given.double().sum())))
        return func(*args, **(kwargs or {}))


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
