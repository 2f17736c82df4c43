"""The attentions of a running model: queries, keys, values and weights, read off its products.

A product of two batched tensors whose result, normalised somehow, is a factor of another: those are the scores, and
that other gives the values their weights. The fused `scaled_dot_product_attention` and `nn.MultiheadAttention` are
read, too; a kernel of its own shows nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from veriformer.properties.adapters.shared.hooks import hooked
from veriformer.properties.definitions.differences import size_of

_NEAR = {torch.float64: 1e-7, torch.float32: 1e-4}  # of the size of a tensor: far above rounding
_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")


@dataclass
class Attended:
    """One attention; the leading axes are those of the model.

    Attributes:
        weights: `[..., T, S]`.
        query: `[..., T, K]`.
        key: `[..., S, K]`.
        value: `[..., S, E]`.
    """

    weights: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


class _Axes(TorchFunctionMode):
    """Notes along which axes softmax is taken, counted from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if getattr(func, "__name__", "") == "softmax" and args:
            dim = given.get("dim", args[1] if len(args) > 1 else None)
            self.seen.add(0 if dim is None else int(dim) if dim < 0 else int(dim) - args[0].ndim)
        return func(*args, **given)


def softmax_axes(run: Callable[[], object]) -> set[int]:
    """Return along which axes, counted from the end, softmax is taken in a call; 0 stands for one that is not said."""
    with torch.no_grad(), _Axes() as axes:
        run()
    return axes.seen


class AttentionWatch(TorchFunctionMode):
    """Notes every attention that is computed while it is entered.

    Attributes:
        seen: in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Attended] = []
        self._products: list[tuple[torch.Size, Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        result = func(*args, **given)
        if name == "scaled_dot_product_attention":
            self._note_fused(*args, **given)
        elif name == "multi_head_attention_forward":
            self.seen.append(_of_module(args, given))
        elif name in _PRODUCTS and isinstance(result, Tensor) and result.ndim >= 3:
            self._note_product(name, args, given, result)
        return result

    def _note_fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        del dropout_p
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        scores = query.detach().double() @ key.detach().double().transpose(-2, -1)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if hidden else scores + attn_mask.detach().double()
        self.seen.append(Attended(scores.softmax(-1), *(x.detach().clone() for x in (query, key, value))))

    def _note_product(self, name: str, args: Any, given: dict[str, Any], result: Tensor) -> None:
        operands = _einsum(args) if name == "einsum" else _product(name, args, given)
        if operands is None:
            return
        left, right, weights, value = operands
        for shape, query, key in reversed(self._products):
            fits = shape[-2:] == weights.shape[-2:] and shape.numel() == weights.numel()
            if fits and value.shape[-2] == weights.shape[-1] and bool((weights >= 0).all()):
                self.seen.append(Attended(weights.detach().clone(), query, key, value.detach().clone()))
                self._products.clear()
                return
        self._products.append((result.shape, left.detach().clone(), right.detach().clone()))
        del self._products[:-4]  # the product that weights are made of is among the last few


def _of_module(args: Any, given: dict[str, Any]) -> Attended:
    """Return what an `nn.MultiheadAttention` attends to, whose products are not seen one by one."""
    bound = _MODULE.bind(*args, **given)
    bound.apply_defaults()
    asked = {**bound.arguments, "need_weights": True, "average_attn_weights": False, "training": False}
    weights: Any = F.multi_head_attention_forward(**asked)[1]
    bias = asked["in_proj_bias"]
    names = ("query", "key", "value")
    if asked["use_separate_proj_weight"]:
        matrices = [asked[f"{name[0]}_proj_weight"] for name in names]
    else:
        matrices = list(asked["in_proj_weight"].chunk(3))
    rows = []
    for name, matrix, offset in zip(names, matrices, bias.chunk(3) if bias is not None else [None] * 3, strict=True):
        row = F.linear(asked[name], matrix, offset)  # [T, B, D], or [T, D]
        row = row if row.ndim == 3 else row[:, None]
        rows.append(row.unflatten(-1, (asked["num_heads"], -1)).permute(1, 2, 0, 3).detach().clone())
    weights = weights if weights.ndim == 4 else weights[None]
    return Attended(weights.detach().clone(), *rows)


_MODULE = inspect.signature(F.multi_head_attention_forward)


def _product(name: str, args: Any, given: dict[str, Any]) -> tuple[Tensor, ...] | None:
    """Return the operands of a product as queries and keys, and as weights and values."""
    tensors = [a for a in (*args, *given.values()) if isinstance(a, Tensor)]
    tensors = tensors[1:] if name == "baddbmm" else tensors
    if len(tensors) != 2 or min(t.ndim for t in tensors) < 3:
        return None
    return tensors[0], tensors[1].transpose(-2, -1), tensors[0], tensors[1]


def _einsum(args: Any) -> tuple[Tensor, ...] | None:
    if not isinstance(args[0], str) or "." in args[0] or "->" not in args[0]:
        return None
    operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
    sides, out = args[0].replace(" ", "").split("->")
    letters = sides.split(",")
    if len(letters) != 2 or len(out) < 3:
        return None
    summed = [c for c in letters[0] if c in letters[1] and c not in out]
    if len(summed) != 1 or min(len(own) for own in letters) < 3:
        return None
    left, right = letters
    wanted = out + summed[0]
    shared = [c for c in left if c in right and c != summed[0]]
    rest = [c for c in right if c not in left]
    queries, keys = _ordered(operands[0], left, wanted), _ordered(operands[1], right, wanted)
    weights = _ordered(operands[0], left, [*(c for c in left if c != summed[0]), summed[0]])
    return queries, keys, weights, _ordered(operands[1], right, [*shared, summed[0], *rest])


def _ordered(value: Tensor, have: str, want: str | list[str]) -> Tensor:
    """Return a tensor with its axes in another order; letters that it does not have are left out."""
    return value.permute([have.index(c) for c in want if c in have])


def attentions(run: Callable[[], object]) -> list[Attended]:
    """Return what is attended while something runs, without gradients."""
    with AttentionWatch() as watch, torch.no_grad():
        run()
    return watch.seen


def near(value: Tensor) -> float:
    """Return how far apart, relative to the size of a tensor, is the same."""
    return _NEAR.get(value.dtype, 2e-2)


def rows_of(got: Tensor, expected: Tensor) -> list[int]:
    """Return for each row of `[..., S, K]` which row of the expected ones it is; -1: none of them."""
    left = got.double().movedim(-2, 0).flatten(1)
    right = expected.double().movedim(-2, 0).flatten(1)
    if left.shape[1] != right.shape[1]:
        return [-1] * len(left)
    apart = torch.cdist(left, right, p=torch.inf)
    nearest, place = apart.min(dim=1)
    limit = near(got) * size_of(right)
    return [int(p) if float(d) <= limit else -1 for d, p in zip(nearest, place, strict=True)]


def module_calls(module: nn.Module, run: Callable[[], object]) -> dict[str, int]:
    """Return how often each module is called while something runs."""
    counts: dict[str, int] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            counts[name] = counts.get(name, 0) + 1

        return hook

    with hooked(part.register_forward_hook(note(name)) for name, part in module.named_modules()), torch.no_grad():
        run()
    return counts
