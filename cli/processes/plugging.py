"""Plug-ins in a process that judges: imported there, and described in plain words to the one that asks."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from veriformer.cli.index import faults_shown, studies
from veriformer.properties.adapters.places import is_of_a_library, location
from veriformer.properties.adapters.plugins import Plugin, PluginError
from veriformer.properties.extending import Loaded, load

_ZOO, _STUDY = "veriformer.tests.mutants", "veriformer.ablations.studies.study"


def described(plugins: Sequence[Plugin]) -> list[dict[str, Any]]:
    """Import plug-ins and say what stands in each.

    Returns:
        Of each its `name`, `origin` and `module`; the ids of its `properties`; its `faults` of the kill matrix; its
        `studies`, each with the target by which it is loaded; whether it `ships` subjects; a digest of its `code`.

    Raises:
        PluginError: one cannot be taken.
    """
    found = load(plugins)
    faults = {one.plugin.name: _faults(one) for one in found}
    ours = {fault["id"] for shown in faults_shown().values() for fault in shown} | {s["name"] for s in studies()}
    records: list[dict[str, Any]] = [
        {
            "name": one.plugin.name, "origin": one.plugin.origin, "module": one.plugin.module,
            "properties": list(one.properties), "faults": faults[one.plugin.name], "studies": _studies(one),
            "ships": hasattr(one.module, "SHIPPED"), "code": _digest(one),
        }
        for one in found
    ]  # fmt: skip
    for one, record in zip(found, records, strict=True):
        for name in (*(f["id"] for f in record["faults"]), *(s["name"] for s in record["studies"])):
            if name in ours:
                raise PluginError(f"the plug-in {one.plugin} cannot be taken: {name!r} is there already; rename it")
            ours.add(name)
    return records


def _faults(one: Loaded) -> list[dict[str, Any]]:
    zoo = sys.modules.get(_ZOO)  # who has not imported it has no fault there
    mine = [] if zoo is None else [fault for fault in zoo.FAULTS.values() if one.owns(fault.subject)]
    return [{"id": f.id, "title": f.title, "citation": f.citation, "killed_by": list(f.killed_by)} for f in mine]


def _studies(one: Loaded) -> list[dict[str, Any]]:
    module = sys.modules.get(_STUDY)
    mine = {} if module is None else one.values(module.Study)
    place = one.module.__name__ if is_of_a_library(one.module) else location(one.module)
    return [{"name": study.name, "question": study.question, "target": f"{place}:{name}"}
            for name, study in mine.items()]  # fmt: skip


def _digest(one: Loaded) -> str:
    digest = hashlib.sha256()
    for file in _files(one):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _files(one: Loaded) -> Iterator[Path]:
    """Yield the files that the plug-in is made of: its own, and what else it imported of its package."""
    top = one.module.__name__.partition(".")[0]
    files = {location(m) for name, m in list(sys.modules.items()) if name == top or name.startswith(f"{top}.")}
    yield from sorted(path for path in map(Path, files) if path.is_file())
