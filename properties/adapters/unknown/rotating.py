"""A lone part that rotates queries and keys, both at once or one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.unknown.arguments import Argument
from veriformer.properties.adapters.unknown.wiring import Wiring
from veriformer.properties.subject.sizes import DrawnConfig

_QUERIES, _KEYS = r"x?_?(q|query|queries)s?", r"x?_?(k|key|keys)s?"
_OFFSETS = r"offset|start(_pos|_index|_position)?|past(_len|_length)?|position_offset|seq_offset"
_POSITIONS = r"(\w+_)?(positions?|pos|position_ids|pos_ids)"
_PLACED = ("positions", "positions[None].expand(len(x), -1)")
_NAMED = r"(?i)rope|rotary|rotat"


def rotating(
    sample: nn.Module, sizes: DrawnConfig, arguments: Sequence[Argument], name: str, kind: str | None
) -> tuple[Wiring, list[str]] | None:
    """Return the call `(x [B, H, T, K], positions [T])` of a module that rotates; or None.

    Args:
        sample: in eval mode.
        sizes: of it.
        arguments: of its forward: queries and keys by their names, or one tensor where its own name says what it is.
        name: of the module.
        kind: that the user says it is.
    """
    names = [a.name.lower() for a in arguments]
    if len(names) > 1 and re.fullmatch(_QUERIES, names[0]) and re.fullmatch(_KEYS, names[1]):
        return _of_both(sample, sizes, arguments)
    if kind == "rotary" or re.search(_NAMED, name):
        return _of_one(sample, sizes, arguments)
    return None


def _of_both(sample: nn.Module, sizes: DrawnConfig, arguments: Sequence[Argument]) -> tuple[Wiring, list[str]] | None:
    """Return the call of a module that rotates queries and keys together.

    Its positions are counted from an offset that it takes, or from 0: then each vector is put where it is to stand.
    """
    if any(a.is_required for a in arguments[2:]):
        return None
    offset = next((a.name for a in arguments[2:] if re.fullmatch(_OFFSETS, a.name.lower())), None)
    for d_head in _widths(sample, sizes):
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
            return _wired(offset, "x{0}, x{0}", "[0]"), notes
    return None


def _are_two(output: Any, x: Tensor) -> bool:
    return (
        isinstance(output, tuple | list)
        and len(output) == 2
        and all(isinstance(t, Tensor) and t.shape == x.shape for t in output)
        and not torch.equal(output[0], x)
    )


def _widths(sample: nn.Module, sizes: DrawnConfig) -> Iterator[int]:
    """Yield the numbers of channels of a head that a module may be made for."""
    width = next((b.shape[-1] for b in sample.buffers() if b.ndim > 1), 2 * max(sizes.d_head // 2, 1))
    yield from dict.fromkeys((sizes.d_head, width, 2 * width))


def _of_one(sample: nn.Module, sizes: DrawnConfig, arguments: Sequence[Argument]) -> tuple[Wiring, list[str]] | None:
    """Return the call of a module that rotates one tensor; where it is to stand may be an argument."""
    positions = [a.name for a in arguments[1:] if re.fullmatch(_POSITIONS, a.name.lower())]
    offset = next((a.name for a in arguments[1:] if re.fullmatch(_OFFSETS, a.name.lower())), None)
    if any(a.is_required and a.name not in positions for a in arguments[1:]):
        return None
    ways: list[tuple[str, str | None]] = [(f"{n}={form}", None) for n in positions for form in _PLACED]
    if not any(a.is_required for a in arguments[1:]):
        ways.append(("", offset))
    for given, counted in ways:
        for swap in ("", ".transpose(1, 2)"):
            wiring = (
                Wiring(("x", "positions"), {"*all": f"x{swap}, {given}"}, pick=swap)
                if given
                else _wired(counted, f"x{{0}}{swap}", swap)
            )
            if any(_turns(wiring, sample, d_head) for d_head in _widths(sample, sizes)):
                heads = "[B, T, H, K]" if swap else "[B, H, T, K]"
                return wiring, [f"judged as rotary by its name, called with {heads}"]
    return None


def _turns(wiring: Wiring, sample: nn.Module, d_head: int) -> bool:
    """Whether equal vectors become others along the positions, and stay equal along the heads."""
    x = torch.randn(d_head, generator=torch.Generator().manual_seed(0)).expand(2, 3, 5, d_head)
    try:
        output = wiring.call(sample, x, torch.arange(5))
    except Exception:
        return False
    if not isinstance(output, Tensor) or output.shape != x.shape:
        return False
    by_head, by_place = (not torch.allclose(output, output.narrow(axis, 0, 1), atol=1e-5) for axis in (1, 2))
    return by_place and not by_head


def _wired(offset: str | None, given: str, pick: str) -> Wiring:
    """Return the call of a module that counts positions from an offset, or from 0: each vector ends a sequence then.

    Args:
        offset: the argument that says where counting begins; None without one.
        given: source of the tensors, with {0} behind the name of x.
        pick: what follows the call to give `[B, H, T, K]`.
    """
    if offset is not None:
        each = f"model({given.format('[:, :, t : t + 1]')}, {offset}=int(p)){pick}"
        return Wiring(("x", "positions"), {"*all": f"[{each} for t, p in enumerate(positions)], dim=2"},
                      target="torch.cat")  # fmt: skip
    before = (
        "if (int(positions.max()) + 1) * x[:, :, 0].numel() > 2**26:  # each vector ends a sequence of its position",
        "    raise IndexError('it takes no offset: positions as far as that are not asked for')",
        "turned = []",
        "for t, p in enumerate(positions.tolist()):",
        "    wide = x[:, :, t : t + 1].expand(-1, -1, p + 1, -1)",
        f"    turned.append(model({given.format('').replace('x', 'wide')}){pick}[:, :, p])",
    )
    return Wiring(("x", "positions"), {"*all": "turned, dim=2"}, before, target="torch.stack")
