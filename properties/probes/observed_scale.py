"""The attention scale of a whole model, read off while it runs: scores as they leave q k^T and as they enter softmax.

Works where a model multiplies queries by keys, scales, and calls torch's softmax, or calls the fused
`F.scaled_dot_product_attention`; not where a kernel of its own does all of it, or a bias is added. Where queries or
keys are multiplied by one number before the product, and no copy lies between, that number is part of the scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

_PRODUCTS = ("matmul", "__matmul__", "bmm", "einsum")
_SOFTMAX = ("softmax",)
_SCALINGS = ("mul", "__mul__", "__rmul__", "mul_", "__imul__", "div", "__truediv__", "div_", "__itruediv__")
_HIDDEN = -1e3  # scores below are masked ones; unit-gain scores stay within a few tens


@dataclass(frozen=True)
class ObservedScale:
    """One softmax over scaled scores.

    Attributes:
        factor: softmax input / (q k^T).
        d_head: length of the product's sum.
    """

    factor: float
    d_head: int


class ScaleWatch(TorchFunctionMode):
    """Watches products and softmaxes while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[ObservedScale] = []
        self._products: list[tuple[Tensor, Tensor, int, float]] = []
        self._scaled: list[tuple[Tensor, float]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            self._fused(args, kwargs or {})
        if name in _SOFTMAX and args and isinstance(args[0], Tensor):
            self._match(args[0].detach())
        result = func(*args, **(kwargs or {}))
        if name in _PRODUCTS and isinstance(result, Tensor) and result.ndim >= 3:
            operand = next((a for a in args if isinstance(a, Tensor)), None)
            if operand is not None:
                before = self._before(args)
                self._products.append((result, result.detach().clone(), operand.shape[-1], before))
                del self._products[:-8]  # the product that a softmax belongs to is among the last few
        if name in _SCALINGS and isinstance(result, Tensor) and len(args) == 2:
            self._note_scaling(name, args, result)
        return result

    def _note_scaling(self, name: str, args: Any, result: Tensor) -> None:
        numbers = [a for a in args if isinstance(a, int | float) or (isinstance(a, Tensor) and a.numel() == 1)]
        if len(numbers) != 1 or not float(numbers[0]):
            return
        factor = float(numbers[0])
        self._scaled.append((result, 1 / factor if "div" in name else factor))
        del self._scaled[:-16]  # queries and keys are scaled shortly before their product

    def _before(self, args: Any) -> float:
        """Return by what the factors of a product were multiplied before: views of what was scaled count."""
        operands = [a for a in args if isinstance(a, Tensor)]
        if any(x.ndim < 3 for x in operands):
            return 1.0  # a matrix of weights, by which heads are mixed, say: no product of queries and keys
        factor = 1.0
        for operand in operands:
            here = operand.untyped_storage().data_ptr()
            found = (f for x, f in reversed(self._scaled) if x.untyped_storage().data_ptr() == here)
            factor *= next(found, 1.0)
        return factor

    def _fused(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Take the scale that a fused kernel is given, or its default."""
        query = args[0] if args else kwargs.get("query")
        if isinstance(query, Tensor):
            width = query.shape[-1]
            given = kwargs.get("scale")
            self.found.append(ObservedScale(width**-0.5 if given is None else float(given), width))

    def _match(self, scores: Tensor) -> None:
        for _, product, width, before in reversed(self._products):
            if product.numel() != scores.numel() or product.shape[-1] != scores.shape[-1]:
                continue
            raw, given = product.double().flatten(), scores.double().flatten()
            seen = given.isfinite() & (given > _HIDDEN)
            raw, given = raw[seen], given[seen]
            if len(raw) < 4 or float(raw.square().sum()) == 0:
                continue
            factor = float((raw * given).sum() / raw.square().sum())
            misfit = float((given - factor * raw).abs().amax() / given.abs().amax().clamp(min=1e-12))
            if misfit < 1e-4 and factor > 0:  # one factor explains all scores: nothing else was added
                self.found.append(ObservedScale(factor * before, width))
                return
