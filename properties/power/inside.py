"""Faults put inside a subject: its calls of torch's attention are intercepted, or a copy of the model gets hooks.

Nothing of the subject is ever altered: interception lasts as long as a call, and hooks are put on a deep copy.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from veriformer.properties.anatomy.norms import is_norm
from veriformer.properties.bench.pool import duplicate
from veriformer.properties.power.injection import Forward, Injected

_PRODUCTS = ("matmul", "__matmul__", "bmm", "einsum")
_HIDDEN = -1e3  # a score, or a term added to scores, below this hides a key
_POSITIONS = re.compile(r"(^|[._])(pos|posi\w*|pe|wpe|inv_freq|freqs\w*|rotary\w*|rope\w*)([._]|$)")


def mask_leaks_by_one(forward: Forward, share: float) -> Injected:
    """Let each query see the next key, wherever a mask hides it."""
    return _masked(forward, _next_key)


def mask_dropped(forward: Forward, share: float) -> Injected:
    """Let each query see every key."""
    return _masked(forward, torch.ones_like)


def scale_dropped(forward: Forward, share: float) -> Injected:
    """Multiply the scores of attention by sqrt(d_head), as if they were not divided by it."""
    return _scaled(forward, lambda width, heads: width**0.5)


def scale_of_the_model(forward: Forward, share: float) -> Injected:
    """Divide the scores of attention by sqrt(heads) too, as if by sqrt(d_model) in all."""
    return _scaled(forward, lambda width, heads: heads**-0.5)


def _scaled(forward: Forward, factor: Callable[[int, int], float]) -> Injected:
    """Multiply scores by `factor(d_head, heads)`: where they are made, or as they enter a softmax."""

    def bound(name: str, given: dict[str, Any]) -> bool:
        if name == "scaled_dot_product_attention":
            width, heads = given["query"].shape[-1], given["query"].shape[-3] if given["query"].ndim > 3 else 1
            by = factor(width, heads)
            given["scale"] = (width**-0.5 if given["scale"] is None else given["scale"]) * by
            return by != 1
        by = factor(given["embed_dim_to_check"] // given["num_heads"], given["num_heads"])
        rows = torch.ones(3, given["embed_dim_to_check"], 1)
        rows[0] = by
        for key, shape in (("in_proj_weight", (-1, 1)), ("in_proj_bias", (-1,))):
            if given[key] is not None:
                given[key] = given[key] * rows.reshape(shape).to(given[key])
        if given["q_proj_weight"] is not None:
            given["q_proj_weight"] = given["q_proj_weight"] * by
        return by != 1

    widths = [1]

    def product(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        operand = next((a for a in args if isinstance(a, Tensor)), None)
        if operand is None or operand.ndim != 4:
            return None
        if name in _PRODUCTS:
            widths[0] = operand.shape[-1]
        by = factor(widths[0], operand.shape[1])
        if name != "softmax" or by == 1:
            return None
        return (torch.where(operand < _HIDDEN, operand, operand * by), *args[1:])

    return _intercepting(forward, bound, product)


def _masked(forward: Forward, allowed: Callable[[Tensor], Tensor]) -> Injected:
    """Break masks: `allowed(hidden)` says which of the hidden pairs `[..., T, S]` are seen all the same."""

    def bound(name: str, given: dict[str, Any]) -> bool:
        sdpa = name == "scaled_dot_product_attention"
        key = given["key"]
        length = given["query"].shape[-2 if sdpa else 0], key.shape[-2 if sdpa else 0]
        mask, changed = given["attn_mask"], False
        if given["is_causal"] and (sdpa or mask is None):
            mask = torch.ones(length, dtype=torch.bool, device=key.device).tril()
            mask = mask if sdpa else ~mask
        given["is_causal"] = False
        if mask is not None and mask.shape[-2:] == length:
            hidden = (~mask if sdpa else mask) if mask.dtype == torch.bool else mask < _HIDDEN
            seen = hidden & allowed(hidden)
            changed = bool(seen.any())
            mask = mask ^ seen if mask.dtype == torch.bool else mask.masked_fill(seen, 0.0)
        given["attn_mask"] = mask
        return changed

    def product(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if name in ("masked_fill", "masked_fill_") and len(args) == 3 and _is_low(args[2]) and _is_pairwise(args[1]):
            seen = args[1] & allowed(args[1])
            return (args[0], args[1] ^ seen, args[2]) if bool(seen.any()) else None
        if name in ("add", "add_", "__add__", "__iadd__"):
            for number in (1, 0):
                term = args[number]
                if isinstance(term, Tensor) and term.is_floating_point() and _is_pairwise(term):
                    hidden = term < _HIDDEN
                    seen = hidden & allowed(hidden)
                    if bool(seen.any()):
                        terms = list(args)
                        terms[number] = term.masked_fill(seen, 0.0)
                        return tuple(terms)
        if name == "where" and len(args) == 3 and _is_pairwise(args[0]):
            low = [_is_low(value) for value in args[1:]]
            if any(low):
                hidden = args[0] if low[0] else ~args[0]
                seen = hidden & allowed(hidden)
                return (args[0] ^ seen, *args[1:]) if bool(seen.any()) else None
        return None

    return _intercepting(forward, bound, product)


def _next_key(hidden: Tensor) -> Tensor:
    queries, keys = hidden.shape[-2:]
    ones = torch.ones(queries, keys, dtype=torch.bool, device=hidden.device)
    step = keys - queries + 1
    return (ones.tril(step) & ones.triu(step)).expand_as(hidden)


def _is_low(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and float(value) < _HIDDEN
    return isinstance(value, int | float) and value < _HIDDEN


def _is_pairwise(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 2 and value.shape[-1] > 1 and value.shape[-2] > 1


class _Interception(TorchFunctionMode):
    """Calls of torch's fused attention with other arguments, and calls that put masks on."""

    def __init__(self, bound: Any, product: Any, changes: list[int]) -> None:
        super().__init__()
        self._bound, self._product, self._changes = bound, product, changes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _FUSED:
            every = _arguments(name, args, given)
            if self._bound(name, every):
                self._changes.append(1)
            return func(**every)
        if self._product is not None and (changed := self._product(name, args)) is not None:
            self._changes.append(1)
            return func(*changed, **given)
        return func(*args, **given)


_FUSED = ("scaled_dot_product_attention", "multi_head_attention_forward")
_SDPA = {"query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False,
         "scale": None, "enable_gqa": False}  # fmt: skip


def _arguments(name: str, args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a fused attention by name, with its defaults."""
    if name == "scaled_dot_product_attention":  # a builtin without a signature
        return {**_SDPA, **dict(zip(_SDPA, args, strict=False)), **given}
    signature = inspect.signature(functional.multi_head_attention_forward).bind(*args, **given)
    signature.apply_defaults()
    return dict(signature.arguments)


def _intercepting(forward: Forward, bound: Any, product: Any) -> Injected:
    changes: list[int] = []

    def broken(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        with _Interception(bound, product, changes):
            return forward(model, *args, **kwargs)

    return Injected(broken, changes)


def positions_removed(forward: Forward, share: float) -> Injected:
    """Take positions away on a copy: what is named after them adds nothing and turns nothing."""
    changes: list[int] = []

    def nothing(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        changes.append(1)
        x = args[0] if args else None
        if isinstance(output, Tensor) and isinstance(x, Tensor) and output.shape == x.shape and x.is_floating_point():
            return x  # it adds positions to x, or turns x by them
        if isinstance(output, tuple) and len(output) == 2:
            return torch.ones_like(output[0]), torch.zeros_like(output[1])  # cosines and sines
        return torch.zeros_like(output) if isinstance(output, Tensor) else None

    def change(model: nn.Module) -> None:
        with torch.no_grad():
            for name, table in (*model.named_parameters(), *model.named_buffers()):
                if _POSITIONS.search(name.lower()) and table.is_floating_point():
                    changes.append(1)
                    table.zero_()
        for name, part in model.named_modules():
            if _POSITIONS.search(name.lower()):
                part.register_forward_hook(nothing)
            elif isinstance(part, nn.Embedding):
                part.register_forward_hook(_zero_if_counting)

    return _on_a_copy(forward, change, changes)


def _zero_if_counting(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """Silence an embedding that is asked for 0, 1, 2, ...: those are positions, not tokens."""
    row = args[0].reshape(-1, args[0].shape[-1])[0] if args and args[0].ndim else torch.zeros(1)
    return output * 0 if len(row) > 2 and bool((row[1:] - row[:-1] == 1).all()) else None


def norm_over_time(forward: Forward, share: float) -> Injected:
    """Normalise over the positions of a sequence in place of the channels of a token."""
    changes: list[int] = []

    def wrong(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        x = args[0] if args else None
        if not isinstance(output, Tensor) or not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] < 2:
            return None
        changes.append(1)
        over_time = (x - x.mean(1, keepdim=True)) * (x.var(1, keepdim=True, unbiased=False) + 1e-5).rsqrt()
        gain, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        over_time = over_time if gain is None else over_time * gain
        return over_time if bias is None else over_time + bias

    def change(model: nn.Module) -> None:
        for part in model.modules():
            if is_norm(part):
                part.register_forward_hook(wrong)

    return _on_a_copy(forward, change, changes)


def _on_a_copy(forward: Forward, change: Callable[[nn.Module], None], changes: list[int]) -> Injected:
    last: list[Any] = [None, (), None]  # the model called last, its state, and its broken copy

    def broken(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        state = (model.training, *(p._version for p in model.parameters())) if isinstance(model, nn.Module) else ()
        if model is not last[0] or state != last[1]:
            twin = duplicate(model)
            change(twin)
            last[:] = [model, state, twin]
        return forward(last[2], *args, **kwargs)

    return Injected(broken, changes)
