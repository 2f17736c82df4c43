"""Which dropouts act while a model runs, and which masks it draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from veriformer.properties.bench.watches import DispatchWatch


class DropoutWatch(TorchFunctionMode):
    """Notes the rate of every dropout that acts while it is entered, fused attention's among them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (nn.functional.dropout, torch.dropout):
            rate = args[1] if len(args) > 1 else given.get("p", 0.5)
            acts = args[2] if len(args) > 2 else given.get("training", given.get("train", True))
            if acts and rate > 0:
                self.seen.append(float(rate))
        elif func is nn.functional.scaled_dot_product_attention:
            rate = args[4] if len(args) > 4 else given.get("dropout_p", 0.0)
            if rate > 0:
                self.seen.append(float(rate))
        return func(*args, **given)


_BENDING = (
    "softmax", "log_softmax", "gelu", "relu", "relu_", "silu", "tanh", "sigmoid", "softplus", "elu", "leaky_relu",
    "exp", "layer_norm", "rms_norm", "scaled_dot_product_attention",
)  # fmt: skip
"""Functions that are not linear: the mean of what they give is not what they give of the mean."""


class BendWatch(DropoutWatch):
    """Notes which function that is not linear is called first behind a dropout that acts.

    Attributes:
        bent: its name; "" if there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bent = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if self.seen and not self.bent and name in _BENDING:
            self.bent = name
        return super().__torch_function__(func, types, args, kwargs)


_MAKE_MASKS = ("bernoulli", "native_dropout", "lt", "le", "gt", "ge", "floor")


class MaskWatch(DispatchWatch):
    """Counts the operations that may make a mask of random numbers while it is entered.

    Dropout draws ones and zeros, or compares uniform numbers with its rate. Noise that is added (a router's, say) does
    neither.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        self.count += name in _MAKE_MASKS or name.startswith(("_scaled_dot_product", "_fused"))
        return func(*args, **(kwargs or {}))
