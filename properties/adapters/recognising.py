"""Recognisers: from somebody's class, instance or function to a subject. One file a library.

To add a library, add a file, and its row to `properties/adapters/libraries.py`. The file has `SHIPPED`, the subjects
that the command line knows by the library's name, and imports the library only when a subject is built (or asked for).
Where types can be recognised it also has `recognise(thing, kind) -> Subject | None`; name it in `ADAPTERS` then.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from veriformer.properties.adapters.libraries import LIBRARIES
from veriformer.properties.adapters.shared.torchvision_stand_in import name_operators
from veriformer.properties.subject.kinds import KINDS
from veriformer.properties.subject.subject import Subject

ADAPTERS = (
    "torch_attention",
    "torch_layers",
    "torch_parts",
    "reference_models",
    "huggingface",
    "x_transformers",
    "timm_blocks",
    "plain",
)
"""Files of this package in the order in which they are asked; `plain` takes what no library claims."""

RECOGNISERS: dict[str, Callable[[Any, str | None], Subject | None]] = {}
"""`recognise` of plug-ins, by the plug-in's name; they are asked first."""


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
    for name, recognise in _recognisers():
        subject = recognise(thing, kind)
        if subject is not None and not isinstance(subject, Subject):
            raise TypeError(
                f"recognise of the plug-in {name} gave a {type(subject).__name__}; a Subject or None is due"
            )
        if subject is not None:
            return subject.with_facts(**declares) if declares else subject
    label = getattr(thing, "__name__", type(thing).__name__)
    raise TypeError(
        f"{label!r} is not recognised; say what it is: "
        "Subject(kind=..., build=lambda c: YourModel(c.d_model, ...), forward=lambda m, x: m(x)), "
        f"or, in Python, pass kind=...; the kinds are: {', '.join(KINDS)}"
    )


def _recognisers() -> Iterator[tuple[str, Callable[[Any, str | None], Subject | None]]]:
    yield from RECOGNISERS.items()
    for name in ADAPTERS:
        yield name, importlib.import_module(f"veriformer.properties.adapters.{name}").recognise


def shipped(library: str) -> Mapping[str, Subject]:
    """Return the subjects that are shipped for a library, by name; some are made when they are asked for.

    Raises:
        KeyError: there is no such library.
        MissingLibraryError: it is not installed.
    """
    entry = LIBRARIES[library]
    if missing := entry.missing():
        raise MissingLibraryError(
            f"{library} needs {', '.join(missing)}, which is not installed; install {' '.join(entry.packages)}, "
            "or all libraries that veriformer knows as CONTRIBUTING.md says"
        )
    name_operators()
    found = [importlib.import_module(module).SHIPPED for module in entry.modules]
    return found[0] if len(found) == 1 else {name: subject for part in found for name, subject in part.items()}


class MissingLibraryError(ImportError):
    """A library that is to be checked is not installed; says what to install."""
