"""Recognisers: from somebody's class, instance or function to a subject. One file a library.

To add a library, add a file with `recognise(thing) -> Subject | None` and its module name to `ADAPTERS`; a file may
also have `SHIPPED`, the subjects that the command line knows by the library's name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from veriformer.properties.subject import KINDS, Subject

ADAPTERS = ("torch_attention", "torch_layers", "torch_parts", "reference_models", "plain")
"""Files of this package in the order in which they are asked; `plain` takes what no library claims."""

_GROUPS: Mapping[str, tuple[str, ...]] = {
    "reference": ("reference_parts", "reference_models", "reference_objectives", "reference_tokenizers"),
    "torch": ("torch_attention", "torch_layers", "torch_parts"),
}


def as_subject(thing: Any, *, kind: str | None = None, **declares: Any) -> Subject:
    """Make a subject of a Subject, a factory returning one, a module class or instance, or a function.

    Args:
        thing: what is to be checked.
        kind: needed where it cannot be told from the thing; a key of `KINDS`.
        declares: facts to declare beside those that the adapter knows.

    Raises:
        TypeError: nothing recognises the thing; the message says what to write instead.
    """
    if isinstance(thing, Subject):
        return thing.with_facts(**declares) if declares else thing
    if kind is not None and kind not in KINDS:
        raise ValueError(f"there is no kind {kind!r}; the kinds are: {', '.join(KINDS)}")
    for name in ADAPTERS:
        recognise: Callable[..., Subject | None] = importlib.import_module(f"{__name__}.{name}").recognise
        subject = recognise(thing, kind)
        if subject is not None:
            return subject.with_facts(**declares) if declares else subject
    label = getattr(thing, "__name__", type(thing).__name__)
    raise TypeError(
        f"{label!r} is not recognised; say what it is: "
        "Subject(kind=..., build=lambda c: YourModel(c.d_model, ...), forward=lambda m, x: m(x)), "
        f"or pass kind=...; the kinds are: {', '.join(KINDS)}"
    )


def shipped(group: str) -> dict[str, Subject]:
    """Return the subjects that are shipped for a library, by name.

    Raises:
        KeyError: there is no such group.
    """
    found: dict[str, Subject] = {}
    for name in _GROUPS[group]:
        found |= importlib.import_module(f"{__name__}.{name}").SHIPPED
    return found


def groups() -> tuple[str, ...]:
    """Return the libraries whose subjects the command line knows by name."""
    return tuple(_GROUPS)
