"""Implementations of attention of Hugging Face transformers: switching between them, and the proof that it was done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_implementation: list[str] = []


class NotSwitchedError(RuntimeError):
    """A model went through another implementation of attention than the one that was asked for."""


@contextmanager
def attention_through(implementation: str) -> Iterator[None]:
    """Let every model that is called inside go through one implementation of attention: eager, sdpa ..."""
    _implementation.append(implementation)
    try:
        yield
    finally:
        _implementation.pop()


class _Counting(TorchFunctionMode):
    """Counts the calls of `scaled_dot_product_attention`, which sdpa makes and eager does not."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and count it if it is that one."""
        self.calls += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def call(model: Any, **given: Any) -> Any:
    """Call a model through the implementation of attention that is chosen now.

    The first call through each is watched: eager code calls no fused kernel, and sdpa calls one.

    Raises:
        NotSwitchedError: the model, or a part of it, does otherwise.
    """
    switched, through = prepared(model)
    seen = model.__dict__.setdefault("_fused_calls", {})
    if through in seen:
        return switched(**given)
    with _Counting() as counting:
        answer = switched(**given)
    seen[through] = counting.calls
    # some call the kernel beside their attention (Inkling 2 mixes residuals with it): then eager calls it less often
    if seen.get("eager") and seen["eager"] >= seen.get("sdpa", 0) and model._released_attention == "sdpa":
        raise NotSwitchedError(f"{_named(model)}: eager attention was asked for, and the fused kernel was called")
    if "eager" in seen and seen.get("sdpa") == 0:
        raise NotSwitchedError(
            f"{_named(model)}: sdpa attention was asked for, and no fused kernel was called: it is eager, too"
        )
    return answer


def prepared(model: Any) -> tuple[Any, str]:
    """Return the model, switched to the implementation of attention that is chosen now, and its name.

    Raises:
        NotSwitchedError: the library left it as it was, or a part of it, which it tells by a warning alone.
    """
    if not hasattr(model, "set_attn_implementation"):
        return model, ""
    released = model.__dict__.setdefault("_released_attention", model.config._attn_implementation)
    wanted = _implementation[-1] if _implementation else released
    if model.config._attn_implementation != wanted:
        model.set_attn_implementation(wanted)
        left = [
            f"{name or 'the model'} ({config._attn_implementation})"
            for name, part in model.named_modules()
            if hasattr(part, "set_attn_implementation") and (config := part.config)._attn_implementation != wanted
        ]
        if left:
            raise NotSwitchedError(
                f"{_named(model)}: {wanted} attention was asked for by set_attn_implementation, and not switched to "
                f"by {', '.join(left[:3])}"
            )
    return model, wanted


def _named(model: Any) -> str:
    return type(model).__name__
