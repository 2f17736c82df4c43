"""By which functions two ways through a model part: an activation in another form, a norm with another eps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

_ACTIVATIONS = ("relu", "silu", "mish", "elu", "leaky_relu", "hardswish", "softplus", "selu", "celu", "tanh", "sigmoid")
_NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm")


class _Names(TorchFunctionMode):
    """Notes which activations and norms are called, and in which form."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", "").rstrip("_"), dict(kwargs or {})
        if name == "gelu":
            self.seen.add("gelu in its tanh form" if given.get("approximate", "none") == "tanh" else "gelu")
        elif name in _NORMS:
            eps = given.get("eps", args[4] if name == "layer_norm" and len(args) > 4 else None)
            self.seen.add(name if eps is None else f"{name} with an eps of {eps:g}")
        elif name in _ACTIVATIONS:
            self.seen.add(name)
        return func(*args, **given)


def ways_part(first: Callable[[], object], second: Callable[[], object], names: tuple[str, str]) -> str | None:
    """Say which activations or norms one run calls and the other does not; None where there are none on either side.

    Args:
        first: one run.
        second: another.
        names: of the two, in words.
    """
    seen = []
    for run in (first, second):
        with _Names() as noted:
            run()
        seen.append(noted.seen)
    one, two = (", ".join(sorted(mine - others)) for mine, others in (seen, seen[::-1]))
    return f"{names[0]} calls {one}, {names[1]} calls {two}" if one and two else None
