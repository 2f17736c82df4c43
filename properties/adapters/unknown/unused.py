"""What a model has beside its forward: an output layer that its caller applies, and what its names say of positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked

_POSITIONS = (
    ("rotary", ("rotary", "rope", "freqs_cis", "freqs_cos", "rotate_half", "apply_rotary_emb")),
    ("alibi", ("alibi",)),
    ("t5", ("relative_position_bucket", "relative_attention_bias")),
)
_WINDOWS = ("sliding_window", "sliding_window_size", "attention_window", "local_window", "window")


def head_left_to_the_caller(sample: nn.Module, run: Any, output: Tensor, vocab_size: int) -> str | None:
    """Return the name of the child that a forward does not call and that maps what it gives to logits; or None.

    Args:
        sample: the model.
        run: calls its forward.
        output: what that gave `[B, T, D]`.
        vocab_size: number of logits.
    """
    called: set[str] = set()

    def noted(name: str) -> Any:
        return lambda module, args: called.add(name)

    children = dict(sample.named_children())
    with hooked(
        [m.register_forward_pre_hook(noted(name)) for name, child in children.items() for m in child.modules()]
    ):
        run()
    for name, child in children.items():
        if name in called or not any(True for _ in child.parameters()):
            continue
        try:
            with torch.no_grad():
                given = child(output)
        except Exception:
            continue
        if isinstance(given, Tensor) and given.shape == (*output.shape[:2], vocab_size):
            return name
    return None


def positions_by_name(sample: nn.Module) -> tuple[str, str] | None:
    """Return what the names in a model's code say of its positions, and the name that says it; or None."""
    names = set(_names(sample))
    for kind, words in _POSITIONS:
        for name in sorted(names):
            if any(word in name.lower() for word in words):
                return kind, name
    return None


def window_by_name(sample: nn.Module) -> tuple[int, str] | None:
    """Return the window that a model keeps under such a name, and the name; None without one, or with several."""
    owners = [
        *sample.modules(),
        *(vars(m)[n] for m in sample.modules() for n in ("config", "cfg", "args") if n in vars(m)),
    ]
    found = {(v, n) for owner in owners for n, v in getattr(owner, "__dict__", {}).items()
             if n in _WINDOWS and type(v) is int and v > 0}  # fmt: skip
    return found.pop() if len({v for v, _ in found}) == 1 else None


def _names(sample: nn.Module) -> Iterator[str]:
    for path, _ in [*sample.named_modules(), *sample.named_buffers()]:
        yield path.rpartition(".")[2]
    for cls in {type(m) for m in sample.modules() if not type(m).__module__.startswith("torch.")}:
        yield cls.__name__
        code = getattr(cls.forward, "__code__", None)
        yield from code.co_names if code is not None else ()
