"""The attentions of a running model: queries, keys, values and weights, as products and softmaxes show them.

Works where a model calls torch's softmax on a product, or the fused `scaled_dot_product_attention`; a kernel of its own
shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")


@dataclass
class Attended:
    """One softmax over the scores of queries and keys; the leading axes are those of the model.

    Attributes:
        weights: `[..., T, S]`.
        query: `[..., T, K]`; None where no product with the scores' shape was seen.
        key: `[..., S, K]`.
        value: `[..., S, E]`; None where the weights meet no product.
    """

    weights: Tensor
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None


class AttentionWatch(TorchFunctionMode):
    """Notes every attention that is computed while it is entered.

    Attributes:
        seen: in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Attended] = []
        self._products: list[tuple[torch.Size, Tensor, Tensor]] = []
        self._open: Attended | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        if name == "scaled_dot_product_attention":
            self._note_fused(*args, **given)
            return func(*args, **given)
        result = func(*args, **given)
        if name in _PRODUCTS and isinstance(result, Tensor) and result.ndim >= 3:
            self._note_product(name, args, given, result)
        if name == "softmax" and isinstance(result, Tensor) and result.ndim >= 3 and _is_last_axis(args, given):
            self._note_softmax(result)
        return result

    def _note_fused(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **given: Any
    ) -> None:
        repeats = query.shape[-3] // key.shape[-3] if given.get("enable_gqa") else 1
        keys = key.repeat_interleave(repeats, -3) if repeats > 1 else key
        scale = given.get("scale") or query.shape[-1] ** -0.5
        scores = query.detach().double() @ keys.detach().double().transpose(-2, -1) * scale
        if given.get("is_causal") or (len(_) > 1 and _[1]):
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask.detach().double()
        self.seen.append(Attended(scores.softmax(-1), *(x.detach().clone() for x in (query, keys, value))))

    def _note_product(self, name: str, args: Any, given: dict[str, Any], result: Tensor) -> None:
        if name == "einsum":
            self._note_einsum(args, result)
            return
        tensors = [a for a in (*args, *given.values()) if isinstance(a, Tensor)]
        if name == "baddbmm":
            tensors = tensors[1:]
        if len(tensors) != 2 or min(t.ndim for t in tensors) < 2:
            return
        left, right = tensors
        if self._open is not None and left.shape[-2:] == self._open.weights.shape[-2:]:
            self._open.value, self._open = right.detach().clone(), None
            return
        self._keep(result.shape, left, right.transpose(-2, -1))

    def _note_einsum(self, args: Any, result: Tensor) -> None:
        if not isinstance(args[0], str) or "." in args[0] or "->" not in args[0]:
            return
        operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
        sides, out = args[0].replace(" ", "").split("->")
        letters = sides.split(",")
        if len(letters) != 2 or len(operands) != 2:
            return
        summed = [c for c in letters[0] if c in letters[1] and c not in out]
        if len(summed) != 1 or len(out) < 3:
            return
        length = operands[1].shape[letters[1].index(summed[0])]
        if self._open is not None and operands[0].shape[-1] == self._open.weights.shape[-1] == length:
            last = next((c for c in reversed(out) if c in letters[1] and c not in letters[0]), None)
            if last is not None:
                self._open.value = _ordered(operands[1], letters[1], out.replace(last, "") + summed[0] + last)
                self._open = None
            return
        wanted = out + summed[0]
        self._keep(result.shape, _ordered(operands[0], letters[0], wanted), _ordered(operands[1], letters[1], wanted))

    def _keep(self, shape: torch.Size, query: Tensor, key: Tensor) -> None:
        self._products.append((shape, query.detach().clone(), key.detach().clone()))
        del self._products[:-4]  # the product that a softmax belongs to is among the last few

    def _note_softmax(self, weights: Tensor) -> None:
        found = Attended(weights.detach().clone())
        for shape, query, key in reversed(self._products):
            if shape[-2:] == weights.shape[-2:] and shape.numel() == weights.numel():
                found.query, found.key = query, key
                break
        if found.query is not None:
            self.seen.append(found)
            self._open = found


def _is_last_axis(args: Any, given: dict[str, Any]) -> bool:
    axis = given.get("dim", args[1] if len(args) > 1 else None)
    return axis == -1 or (isinstance(axis, int) and axis == args[0].ndim - 1)


def _ordered(value: Tensor, have: str, want: str) -> Tensor:
    """Return a tensor with its axes in another order; letters that it does not have are left out."""
    order = [c for c in want if c in have]
    return value.permute([have.index(c) for c in order]) if len(order) == len(have) else value


def attentions(run: Callable[[], object]) -> list[Attended]:
    """Return what is attended while something runs, without gradients."""
    with AttentionWatch() as watch, torch.no_grad():
        run()
    return watch.seen
