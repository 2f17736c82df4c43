"""The catalogue: every property there is, and which of them a run judges."""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources

from veriformer.properties.engine.property import Property, registered

FAMILIES = "veriformer.properties.families"


def catalogue() -> Mapping[str, Property]:
    """Return every property by id, in the order of the families' files, then what plug-ins added.

    Imports the families on first use.
    """
    _import_families()
    return dict(sorted(registered().items(), key=lambda item: _place_of(item[1])))


@functools.cache
def _import_families() -> None:
    package = importlib.import_module(FAMILIES)
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        importlib.import_module(f"{package.__name__}.{module.name}")


def _place_of(prop: Property) -> tuple[bool, str, int]:
    module = prop.check.__module__
    return not module.startswith(FAMILIES), module, prop.check.__code__.co_firstlineno


def named(ids: Iterable[str]) -> list[Property]:
    """Return the properties with these ids; a family name or `family.*` stands for all of its properties.

    Raises:
        KeyError: an id does not exist; the message suggests the nearest one.
    """
    known = catalogue()
    found: dict[str, Property] = {}
    for wanted in ids:
        family = wanted.removesuffix(".*")
        members = {i: p for i, p in known.items() if i == wanted or p.family == family}
        if not members:
            close = difflib.get_close_matches(wanted, list(known), n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise KeyError(f"there is no property {wanted!r}; {hint}`veriformer list` shows them all")
        found |= members
    return list(found.values())


def in_dependency_order(properties: Iterable[Property]) -> list[Property]:
    """Return the properties so that what one requires stands before it, the given order kept otherwise.

    Raises:
        ValueError: the requirements go round in a circle.
    """
    wanted = {p.id: p for p in properties}
    done: dict[str, Property] = {}
    visiting: list[str] = []

    def visit(prop: Property) -> None:
        if prop.id in done:
            return
        if prop.id in visiting:
            raise ValueError(f"the requirements go round in a circle: {' -> '.join([*visiting, prop.id])}")
        visiting.append(prop.id)
        for needed in prop.requires:
            if needed in wanted:
                visit(wanted[needed])
        visiting.pop()
        done[prop.id] = prop

    for prop in wanted.values():
        visit(prop)
    return list(done.values())


def select(only: Sequence[str] = (), exclude: Sequence[str] = (), level: str = "all") -> list[Property]:
    """Return the properties to judge, in dependency order.

    Args:
        only: ids or families; empty for all.
        exclude: ids or families to leave out.
        level: "core" or "all".

    Raises:
        KeyError: an id does not exist; the message suggests the nearest one.
    """
    chosen = named(only) if only else list(catalogue().values())
    left_out = {p.id for p in named(exclude)} if exclude else set()
    return in_dependency_order(p for p in chosen if p.id not in left_out and (level == "all" or p.level == "core"))


@functools.cache
def faults_shown() -> dict[str, list[dict[str, str]]]:
    """Return, for each property, the faults of the zoo that show it failing: id, title, citation."""
    text = resources.files("veriformer.properties.judging").joinpath("faults_killed.json").read_text(encoding="utf-8")
    return json.loads(text)
