"""A lone part, told by what it does or takes: it adds positions, or is a loss of labels."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.unknown.arguments import Argument
from veriformer.properties.adapters.unknown.wiring import Wiring
from veriformer.properties.subject.sizes import DrawnConfig

_SINES = ("sin", "cos", "sin_", "cos_")
_LOGITS, _LABELS = r"(\w+_)?logits?", r"labels?|targets?|tgt|y|target_ids"


def table_added(sample: nn.Module, wiring: Wiring, x: Tensor) -> tuple[Wiring, list[str]] | None:
    """Return the call `(length) -> [T, D]` that reads what a module adds to its input; None where it adds no table.

    Args:
        sample: in eval mode.
        wiring: how it is called with embeddings.
        x: embeddings `[B, T, D]` that it takes.
    """
    run: Callable[[Tensor], Any] = lambda v: wiring.call(sample, v)  # noqa: E731
    first, larger = run(x), run(3 * x)
    if first.shape != x.shape:
        return None
    scale = float(((larger - first) * x).sum() / (2 * x.square().sum()))
    added = first - scale * x
    again = run(torch.roll(x, 1, -1)) - scale * torch.roll(x, 1, -1)
    if abs(scale) < 1e-3 or not torch.allclose(added, again, atol=1e-4) or not _linear(first, larger, x, scale):
        return None
    by_axis = [torch.allclose(added, added.narrow(axis, 0, 1), atol=1e-4) for axis in (0, 1)]
    if by_axis == [True, False]:
        shape, pick = "1, length", "[0]"
    elif by_axis == [False, True]:
        shape, pick = "length, 1", "[:, 0]"
    else:
        return None
    table = next(_tables(sample, x.shape[-1]), None)
    if table is None:
        return None
    zeros = f"torch.zeros({shape}, {table}.shape[-1], dtype={table}.dtype, device={table}.device)"
    notes = ["judged as positions: it adds the same table to whatever it is given; --kind layer if it is none"]
    if by_axis[1]:
        notes.append("the table runs along its first axis: judged as [T, B, D]; of [B, T, D] it numbers samples")
    if abs(scale - 1) > 1e-3:
        notes.append(f"its input is multiplied by {scale:.4g}, which is not judged")
    found = replace(wiring, inputs=("length",), given={**wiring.given, "*first": zeros}, pick=wiring.pick + pick)
    return found, notes


def kind_of_table(sample: nn.Module) -> dict[str, Any]:
    """Return what the code of a module says of its table: sines and cosines are computed, or it is a parameter."""
    names: set[str] = set()
    for cls in type(sample).__mro__[: type(sample).__mro__.index(nn.Module)]:
        for part in vars(cls).values():
            names |= _names(part, depth=2)
    if names.intersection(_SINES) and not any(p.ndim > 1 for p in sample.parameters()):
        return {"positions": "sinusoidal"}
    return {"positions": "learned" if any(p.ndim > 1 for p in sample.parameters()) else "other"}


def _names(function: Any, depth: int) -> set[str]:
    """Return the names that a function uses, those of the functions beside it that it calls among them."""
    code = getattr(function, "__code__", None)
    if code is None or not depth:
        return set()
    own = set(code.co_names)
    beside = [function.__globals__.get(name) for name in own]
    return own.union(*(_names(one, depth - 1) for one in beside if inspect.isfunction(one)))


def _linear(first: Tensor, larger: Tensor, x: Tensor, scale: float) -> bool:
    return torch.allclose(larger - first, 2 * scale * x, atol=1e-4)


def _tables(sample: nn.Module, width: int) -> Iterator[str]:
    """Yield the source of each table of rows of a width, after the name of the model."""
    for path, table in [*sample.named_parameters(), *sample.named_buffers()]:
        if table.ndim > 1 and table.shape[-1] == width and not any(word.isdigit() for word in path.split(".")):
            yield f"model.{path}"


def is_loss(arguments: Sequence[Argument]) -> bool:
    """Whether a forward takes logits and labels by their names, and nothing else that it needs."""
    names = [a.name.lower() for a in arguments]
    return (
        len(names) > 1
        and re.fullmatch(_LOGITS, names[0]) is not None
        and re.fullmatch(_LABELS, names[1]) is not None
        and not any(a.is_required for a in arguments[2:])
    )


def loss_of(sample: nn.Module, sizes: DrawnConfig) -> tuple[Wiring, list[str], dict[str, Any]] | None:
    """Return the call `(logits [B, T, V], labels [B, T])` of a loss, notes, and facts that its attributes say; or None.

    What it takes may be flat: `[B * T, V]` and `[B * T]`.
    """
    logits = torch.randn(2, 5, sizes.vocab_size, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(10).reshape(2, 5) % (sizes.vocab_size - 1) + 1
    told = "judged as a loss by the names of its arguments"
    for given, how in (("logits, labels", ""), ("logits.flatten(0, 1), labels.flatten()", "; positions are flattened")):
        for pick in ("", "[0]"):
            wiring = Wiring(("logits", "labels"), {"*all": given}, pick=pick)
            try:
                value = wiring.call(sample, logits, labels)
            except Exception:
                continue
            if isinstance(value, Tensor) and value.ndim == 0:
                return wiring, [told + how], _said(sample)
    return None


def _said(sample: nn.Module) -> dict[str, Any]:
    """Return the facts that a loss keeps as attributes of their names."""
    ignored = next((vars(sample)[n] for n in ("ignore_index", "padding_idx", "pad_id", "pad_idx", "pad_token_id")
                    if isinstance(vars(sample).get(n), int)), None)  # fmt: skip
    return {} if ignored is None else {"ignore_index": ignored}
