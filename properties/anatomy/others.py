"""Modules with parameters of their own that are no part known by name: what they hold, and what they do to tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from veriformer.properties.anatomy.norms import is_norm
from veriformer.properties.anatomy.traced import ModuleCall, Traced

_KNOWN = (nn.Linear, nn.Embedding, nn.Dropout)


def shapes_of(module: nn.Module, *, recurse: bool = True) -> dict[str, list[int]]:
    """Return the shapes of a module's parameters by name."""
    return {name: list(p.shape) for name, p in module.named_parameters(recurse=recurse)}


def held_at(module: nn.Module, place: str) -> dict[str, list[int]]:
    """Return the shapes of the parameters of the part at a place; none where no module is there, or it is the whole."""
    try:
        return shapes_of(module.get_submodule(place)) if place else {}
    except AttributeError:  # a path that is no module's own: of a hooked copy, say
        return {}


def in_words(shapes: dict[str, list[int]]) -> str:
    """Return shapes in words: `gain [8], table [3, 8]`."""
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def unnamed(seen: Traced, known: Iterable[str]) -> Iterator[tuple[ModuleCall, dict[str, Any], str]]:
    """Yield calls of modules that hold parameters and are no part that was recognised.

    Args:
        seen: the trace of a forward.
        known: places of the parts that were.

    Yields:
        The call, what was measured, and that in words.
    """
    places = set(known)
    for call in seen.calls:
        shapes = shapes_of(call.part, recurse=False)
        if not shapes or call.place in places or isinstance(call.part, _KNOWN) or is_norm(call.part):
            continue
        given, made = call.given.double(), call.made.double()
        share = float(made.norm() / given.norm().clamp(min=1e-300))
        factor = float((made * given).sum() / given.square().sum().clamp(min=1e-300))
        measured = {"class": type(call.part).__name__, "parameters": shapes, "channels": given.shape[-1],
                    "size": share, "along": factor}  # fmt: skip
        words = f"{measured['class']} with {in_words(shapes)}: what it gives is {share:.5g} times as large"
        yield call, measured, words
