"""What later inputs may change where no gradient passes: a choice, a step of rounding, a number that is detached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CHOOSING = frozenset(
    (
        "topk",
        "sort",
        "argsort",
        "argmax",
        "argmin",
        "kthvalue",
        "msort",
        "searchsorted",
        "nonzero",
        "unique",
        "multinomial",
    )
)
_ROUNDING = frozenset(("round", "floor", "trunc", "char", "fake_quantize_per_tensor_affine", "quantize_per_tensor"))


class _Names(TorchFunctionMode):
    """Notes which of torch's functions are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(getattr(func, "__name__", "").rstrip("_"))
        return func(*args, **(kwargs or {}))


def without_gradient(call: Callable[[], object]) -> str:
    """Say what may be taken over the whole sequence where later inputs matter and their gradient is zero.

    Args:
        call: runs the subject once.
    """
    with torch.no_grad(), _Names() as names:
        call()
    what = "what is chosen for a token (the k best, experts with room for so many) is chosen among all of the sequence"
    if not names.seen & _CHOOSING:
        what = "a number that is detached (a scale, a mean, a largest value) is taken over all of the sequence"
        if names.seen & _ROUNDING:
            what = "the scale by which numbers are rounded is taken over all of the sequence, and not token by token"
    return f"later inputs change earlier outputs, and no gradient passes between them: {what}"
