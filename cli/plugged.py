"""The plug-ins of this folder and of what is installed, seen from a command: it names them and imports none."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from veriformer.cli.project import ProjectError, nearest
from veriformer.cli.speaking import screen
from veriformer.properties.adapters.libraries import LIBRARIES, Library
from veriformer.properties.adapters.plugins import Plugin, PluginError, add, installed


@dataclass(frozen=True)
class Plugged:
    """What plug-ins add.

    Attributes:
        plugins: records of `plugging.described`.
        properties: described as in the index, each with its `origin`, by id.
    """

    plugins: list[dict[str, Any]] = field(default_factory=list)
    properties: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def faults(self) -> dict[str, dict[str, Any]]:
        """The faults of the kill matrix, by id."""
        return {fault["id"]: {**fault, "origin": _origin(one)} for one in self.plugins for fault in one["faults"]}

    @property
    def shown(self) -> dict[str, list[dict[str, Any]]]:
        """For each property the faults that show it failing."""
        found: dict[str, list[dict[str, Any]]] = {}
        for fault in self.faults.values():
            for prop in fault["killed_by"]:
                found.setdefault(prop, []).append(fault)
        return found

    @property
    def levels(self) -> list[dict[str, str]]:
        """Id and level of each property."""
        return [{"id": p["id"], "level": p["level"]} for p in self.properties.values()]

    @property
    def studies(self) -> dict[str, dict[str, Any]]:
        """Name, question, target and origin of each study, by name."""
        return {study["name"]: {**study, "origin": _origin(one), "default": False}
                for one in self.plugins for study in one["studies"]}  # fmt: skip

    @property
    def code(self) -> str:
        """What names the code of all plug-ins; "" where there is none."""
        return "".join(f" {one['name']} {one['code']}" for one in self.plugins)


def configured() -> list[Plugin]:
    """Return the plug-ins of the packages that are installed, then those of the project of this folder.

    Raises:
        click.UsageError: one is named wrongly, or two have one name.
    """
    try:
        found = {one.name: one for one in installed()}
        for one in nearest(Path.cwd()).plugins():
            add(found, one)
    except (PluginError, ProjectError) as problem:
        raise click.UsageError(str(problem)) from None
    return list(found.values())


def with_plugins(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of processes that judge, with the plug-ins that they import.

    Raises:
        click.UsageError: one is named wrongly.
    """
    return {**settings, "plugins": [asdict(one) for one in configured()]}


def plugged() -> Plugged:
    """Return what the plug-ins add, each imported in a process of its own; on standard error it says which there are.

    Raises:
        click.UsageError: one cannot be taken.
    """
    plugins = configured()
    if not plugins:
        return Plugged()
    from veriformer.cli.processes.asking import Pool, RefusedError

    screen(aside=True).print(_told(plugins), style="dim", soft_wrap=True)
    settings = {"profile": "quick", "seed": 0, "device": "cpu", "dtypes": (), "call_seconds": 30.0}
    try:
        with Pool(1, with_plugins(settings), 8.0) as pool:
            answer = pool.ask("plugged")
    except RefusedError as problem:
        raise click.UsageError(str(problem)) from None
    LIBRARIES.update({one["name"]: Library((), plugin=one["module"]) for one in answer["plugins"] if one["ships"]})
    origins = {i: _origin(one) for one in answer["plugins"] for i in one["properties"]}
    properties = {p["id"]: {**p, "explanation": p["why"], "origin": origins[p["id"]]} for p in answer["properties"]}
    return Plugged(answer["plugins"], properties)


def told_of_plugins() -> str:
    """Return which plug-ins there are, in words; "" where there is none."""
    return _told(configured())


def _told(plugins: list[Plugin]) -> str:
    return f"plug-ins: {', '.join(map(str, plugins))}" if plugins else ""


def _origin(plugin: dict[str, Any]) -> str:
    return f"{plugin['name']} ({plugin['origin']})"
