"""Which operation costs the precision: one sort after another is done in float64, and the answer compared again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import tolerance_of
from veriformer.properties.bench.pool import Built, duplicate
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation
from veriformer.properties.subject.inputs import ordinary

_PRODUCTS = {"matmul", "__matmul__", "bmm", "einsum", "baddbmm", "addmm", "linear", "mm",
             "scaled_dot_product_attention"}  # fmt: skip

_SORTS = {
    "a softmax": {"softmax", "log_softmax", "_softmax"},
    "a cumulative sum or product": {"cumsum", "cumprod", "logcumsumexp"},
    "a statistic (mean, square, root)": {
        "sum", "mean", "var", "std", "var_mean", "norm", "vector_norm", "pow", "square", "sqrt", "rsqrt", "__pow__",
    },
    "an exponential or logarithm": {"exp", "log", "exp2", "log2", "expm1", "log1p", "logsumexp", "softplus"},
    "a matrix product": _PRODUCTS,
    "a normalization": {"layer_norm", "rms_norm", "group_norm", "normalize"},
}  # fmt: skip
"""What is done where numbers of few bits are known to be too few."""


class _Wide(TorchFunctionMode):
    """Does some operations in float64, and what follows up to the next product; notes the largest angle."""

    def __init__(self, low: torch.dtype, names: set[str]) -> None:
        super().__init__()
        self.low, self.names, self.done, self.angle = low, names, 0, 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("sin", "cos") and args and isinstance(args[0], Tensor) and args[0].dtype == self.low:
            self.angle = max(self.angle, float(args[0].detach().abs().max()))
        if name in self.names and self._has(self.low, (args, given)):
            self.done += 1
            output = func(*tree_map(self._widen, args), **tree_map(self._widen, given))
            return tree_map(self._round, output) if name in _PRODUCTS else output
        mixed = self._has(torch.float64, (args, given)) and self._has(self.low, (args, given))
        if mixed and name in _PRODUCTS:  # what came of it goes on in the low dtype at the next product
            return func(*tree_map(self._round, args), **tree_map(self._round, given))
        return func(*args, **given)

    @staticmethod
    def _has(dtype: torch.dtype, value: Any) -> bool:
        return any(isinstance(x, Tensor) and x.dtype == dtype for x in tree_leaves(value))

    def _round(self, x: Any) -> Any:
        return x.to(self.low) if isinstance(x, Tensor) and x.dtype == torch.float64 else x

    def _widen(self, x: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype == self.low:
            return x.double()
        return torch.float64 if x is self.low else x


def precision_cause(case: Case, problem: Violation) -> str | None:
    """Name the sort of operation without whose rounding the answer is right.

    Args:
        case: of the violation.
        problem: whose headline begins with the dtype that is wrong.
    """
    low = getattr(torch, problem.headline.split()[0], None)
    if not isinstance(low, torch.dtype):
        return None
    built = case.bench.pool.get(case.config(), low)
    if not isinstance(built.module, nn.Module):
        return None
    inputs = ordinary(case.subject, built.config, torch.Generator().manual_seed(1), low)
    tensors = [x.to(case.bench.device) for x in inputs.tensors]
    wide = Built(duplicate(built.module), built.config, torch.float64, built.is_fresh)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        wide.module.double()
        exact = case.call(wide, *[x.double() if x.is_floating_point() else x for x in tensors], *inputs.extras)
        limit = tolerance_of(case.bench, built)

        def error(names: set[str]) -> tuple[float, _Wide]:
            mode = _Wide(low, names)
            with mode:
                output = case.call(built, *tensors, *inputs.extras).double()
            return worst_difference(output, exact.double(), size_of(exact)).error, mode

        before, plain = error(set())
        if before <= limit:  # where NaN is given it goes on
            return None
        mended = []
        for words, names in _SORTS.items():
            try:
                after, mode = error(names)
            except SubjectError:  # it writes what is wide into what is not
                continue
            if mode.done and after <= limit and not after > before / 3:
                mended.append((words, after))
    eps = torch.finfo(low).eps
    name = str(low).removeprefix("torch.")
    if len(mended) == 1:
        words, after = mended[0]
        return (
            f"{words} is computed in {name}: in float64, all else left in {name}, the error falls from "
            f"{before / eps:.3g} to {after / eps:.3g} units in the last place"
        )
    if not mended and plain.angle * eps / 2 > 0.02:
        return (
            f"sines and cosines are taken of angles up to {plain.angle:.3g} in {name}, which are off by up to "
            f"{plain.angle * eps / 2:.2g} radians: positions and frequencies belong in float32 until then"
        )
    return None


_ENDS = ("sin", "cos", "sin_", "cos_", "sincos", "polar", "exp", "complex")
_CASTS = ("to", "type", "bfloat16", "half", "type_as", "__getitem__")


class AngleWatch(TorchFunctionMode):
    """Notes the first operation before sines and cosines that gives numbers of 16 bits of wider ones.

    Attributes:
        seen: what it is, in words; "" for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.is_over = "", False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        self.is_over |= name in _ENDS
        if self.is_over or self.seen or not isinstance(result, Tensor):
            return result
        given = [x.dtype for x in args if isinstance(x, Tensor)]
        half = (torch.bfloat16, torch.float16)
        if result.dtype in half and given and not any(dtype in half for dtype in given):
            dtype = str(result.dtype).removeprefix("torch.")
            told = f"are cast to {dtype} by `{name}`"
            if name not in _CASTS:
                told = f"go through a matrix product (`{name.strip('_')}`), which autocast computes in {dtype}"
            self.seen = f"before sines and cosines are taken, positions or frequencies {told}"
        return result


def angles_in_half(run: Callable[[], object]) -> str | None:
    """Say where a rotation's angles come to be of 16 bits; None where they do not before sines and cosines.

    Args:
        run: turns vectors, under autocast where that is in question.
    """
    with AngleWatch() as watch, torch.no_grad():
        run()
    return watch.seen or None
