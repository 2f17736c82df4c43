"""A lone part, told by what it does or takes: it adds positions, rotates queries and keys, or is a loss of labels."""

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
_QUERIES, _KEYS = r"x?_?(q|query|queries)s?", r"x?_?(k|key|keys)s?"
_OFFSETS = r"offset|start(_pos|_index|_position)?|past(_len|_length)?|position_offset|seq_offset"
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


def rotating(sample: nn.Module, sizes: DrawnConfig, arguments: Sequence[Argument]) -> tuple[Wiring, list[str]] | None:
    """Return the call `(x [B, H, T, K], positions [T])` of a module that rotates queries and keys together; or None.

    Its positions are counted from an offset that it takes, or from 0: then each vector is put where it is to stand.
    """
    names = [a.name.lower() for a in arguments]
    if len(names) < 2 or not (re.fullmatch(_QUERIES, names[0]) and re.fullmatch(_KEYS, names[1])):
        return None
    if any(a.is_required for a in arguments[2:]):
        return None
    offset = next((a.name for a in arguments[2:] if re.fullmatch(_OFFSETS, a.name.lower())), None)
    width = next((b.shape[-1] for b in sample.buffers() if b.ndim > 1), 2 * max(sizes.d_head // 2, 1))
    for d_head in dict.fromkeys((sizes.d_head, width, 2 * width)):
        x = torch.randn(2, 3, 5, d_head, generator=torch.Generator().manual_seed(0))
        try:
            with torch.no_grad():
                output = sample(x, x)
        except Exception:
            continue
        if _are_two(output, x):
            notes = ["judged as rotary by the names of its arguments: what it makes of the queries"]
            if not torch.equal(output[0], output[1]):
                notes.append(
                    "queries and keys that are equal are rotated otherwise: what it makes of keys is not judged"
                )
            return _wired(offset), notes
    return None


def _are_two(output: Any, x: Tensor) -> bool:
    return (
        isinstance(output, tuple | list)
        and len(output) == 2
        and all(isinstance(t, Tensor) and t.shape == x.shape for t in output)
        and not torch.equal(output[0], x)
    )


def _wired(offset: str | None) -> Wiring:
    if offset is not None:
        each = f"model(x[:, :, t : t + 1], x[:, :, t : t + 1], {offset}=int(p))[0]"
        return Wiring(("x", "positions"), {"*all": f"[{each} for t, p in enumerate(positions)], dim=2"},
                      target="torch.cat")  # fmt: skip
    before = (
        "if (int(positions.max()) + 1) * x[:, :, 0].numel() > 2**26:  # each vector ends a sequence of its position",
        "    raise IndexError('it takes no offset: positions as far as that are not asked for')",
        "turned = []",
        "for t, p in enumerate(positions.tolist()):",
        "    wide = x[:, :, t : t + 1].expand(-1, -1, p + 1, -1)",
        "    turned.append(model(wide, wide)[0][:, :, p])",
    )
    return Wiring(("x", "positions"), {"*all": "turned, dim=2"}, before, target="torch.stack")


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
