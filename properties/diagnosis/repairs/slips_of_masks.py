"""Slips of masks: turned round, off by one, joined by the wrong word."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veriformer.properties.diagnosis.repairs.slips import Call, Slip, Undo, first_tensor, given, of_result, result_of


def _turned_mask(place: int) -> Undo:
    def undo(call: Call) -> Any:
        func, args, kwargs = call
        if len(args) <= place or not isinstance(args[place], Tensor) or args[place].dtype != torch.bool:
            return NotImplemented
        return func(*args[:place], ~args[place], *args[place + 1 :], **kwargs)

    return undo


def _diagonal(step: int) -> Undo:
    def undo(call: Call) -> Any:
        func, args, kwargs = call
        diagonal = int(given(call, 1, "diagonal", 0))
        return func(args[0], diagonal=diagonal + step, **{k: v for k, v in kwargs.items() if k != "diagonal"})

    return undo


def _other_triangle(call: Call) -> Any:
    func, args, kwargs = call
    other = torch.triu if func.__name__ == "tril" else torch.tril
    return other(*args, **kwargs)


_COMPARED = {
    "lt": torch.le, "le": torch.lt, "gt": torch.ge, "ge": torch.gt,
    "__lt__": torch.le, "__le__": torch.lt, "__gt__": torch.ge, "__ge__": torch.gt,
}  # fmt: skip
_SIGNS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _compared(name: str) -> Undo:
    def undo(call: Call) -> Any:
        return _COMPARED[name](*call[1]) if len(call[1]) == 2 and isinstance(call[1][0], Tensor) else NotImplemented

    return undo


_JOINED = {
    **dict.fromkeys(("__and__", "__rand__", "logical_and", "bitwise_and"), torch.logical_or),
    **dict.fromkeys(("__or__", "__ror__", "logical_or", "bitwise_or"), torch.logical_and),
}


def _joined(call: Call) -> Any:
    a, b = (*call[1], None, None)[:2]
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dtype != torch.bool or b.dtype != torch.bool:
        return NotImplemented
    return _JOINED[call[0].__name__](a, b)


def _filled_otherwise(call: Call) -> Any:
    func, x = call[0], first_tensor(call)
    if x is None or x.dtype != torch.bool:
        return NotImplemented
    value = given(call, 3, "value", 0)
    return func(x, given(call, 1, "pad"), value=0.0 if value else 1.0)


def _flagged(call: Call) -> Any:
    func, args, kwargs = call
    if len(args) > 3 or kwargs.get("attn_mask") is not None:
        return NotImplemented
    return func(*args, **{**kwargs, "is_causal": not kwargs.get("is_causal", False)})


def _mask_by_name(name: str) -> Undo:
    def undo(call: Call) -> Any:
        func, args, kwargs = call
        mask = kwargs.get(name)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            return NotImplemented
        return func(*args, **{**kwargs, name: ~mask})

    return undo


def _zeros_kept(call: Call) -> Any:
    """Leave tokens zero that were zeroed before a function that makes another number of 0."""
    x, made = first_tensor(call), result_of(call)
    if x is None or not x.is_floating_point() or not isinstance(made, Tensor) or x.ndim < 2:
        return NotImplemented
    if made.shape[:-1] != x.shape[:-1]:
        return NotImplemented
    hidden = (x == 0).all(-1, keepdim=True)
    return made.masked_fill(hidden, 0.0) if bool(hidden.any()) and not bool(hidden.all()) else NotImplemented


_TRUTHS = (
    "full", "ones", "zeros", "ones_like", "zeros_like", "new_full", "new_ones", "new_zeros", "full_like", "__eq__",
    "__ne__", "eq", "ne",
)  # fmt: skip
_ATTENTIONS = ("scaled_dot_product_attention", "multi_head_attention_forward")
_OF_ZERO = (
    "add", "__add__", "__radd__", "cos", "elu", "exp", "layer_norm", "linear", "sigmoid", "softplus", "softmax", "cosh",
)  # fmt: skip
_NOT = of_result(torch.logical_not, dtypes=(torch.bool,))

SLIPS = (
    Slip(("masked_fill", "masked_fill_"), "the mask turned round", _turned_mask(1)),
    Slip(("pad",), "the mask filled up with the other truth value", _filled_otherwise),
    Slip(("scaled_dot_product_attention",), "`is_causal` turned round", _flagged),
    Slip(_ATTENTIONS, "its mask turned round", _mask_by_name("attn_mask")),
    Slip(_ATTENTIONS, "its mask of padding turned round", _mask_by_name("key_padding_mask")),
    Slip(_OF_ZERO, "tokens that the mask made zero before left zero", _zeros_kept),
    Slip(("where",), "the condition turned round", _turned_mask(0)),
    Slip(("__invert__", "logical_not", "bitwise_not"), "the mask as it was, not negated", _NOT),
    Slip(_TRUTHS, "its truth values negated", _NOT),
    Slip(("tril", "triu"), "the diagonal one lower", _diagonal(-1)),
    Slip(("tril", "triu"), "the diagonal one higher", _diagonal(1)),
    Slip(("tril", "triu"), "the other triangle", _other_triangle),
    *(
        Slip((name,), f"`{_SIGNS[other.__name__]}` in place of `{_SIGNS[name.strip('_')]}`", _compared(name))
        for name, other in _COMPARED.items()
    ),
    Slip(tuple(_JOINED), "AND and OR exchanged", _joined),
)
