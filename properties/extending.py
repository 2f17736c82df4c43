"""Plug-ins: modules of somebody else's that add to what is here, without a fork.

A plug-in is a module. What stands in it is taken for what it is:

| in the module | is |
|---|---|
| a function under `@holds(...)` | a property |
| a `Fault` | a way to break a user's subject in every run; its properties must notice |
| a `Canary` | a known-broken model that every run must notice |
| a function under `@fault(...)` of `veriformer.tests.mutants` | a broken model of the kill matrix |
| `recognise(thing, kind)`, which gives a Subject or None | an adapter, asked before those that are shipped |
| `SHIPPED`, subjects by name | what `veriformer check NAME` and `sweep NAME` judge, NAME that of the plug-in |
| a `Study` of `veriformer.ablations` | what `veriformer ablate STUDY` runs |

A package that is installed names its module in the group `veriformer.plugins` of its entry points; a project names its
own with `plugins = ["my_module"]` under [tool.veriformer]. A plug-in is code that the user named, so it is trusted.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from veriformer.properties.adapters.libraries import LIBRARIES, Library
from veriformer.properties.adapters.places import Beside
from veriformer.properties.adapters.plugins import Plugin, PluginError, installed
from veriformer.properties.adapters.recognising import RECOGNISERS
from veriformer.properties.adapters.shadows import shadow
from veriformer.properties.bench.guards import is_its_own
from veriformer.properties.engine.property import Property
from veriformer.properties.judging.catalogue import catalogue
from veriformer.properties.power.canaries import CANARIES, Canary
from veriformer.properties.power.faults import FAULTS, Fault
from veriformer.properties.subject.raised import told


@dataclass(frozen=True)
class Loaded:
    """A plug-in that was imported.

    Attributes:
        plugin: where it comes from.
        module: that was imported.
        properties: of its own, by id.
    """

    plugin: Plugin
    module: ModuleType
    properties: Mapping[str, Property]

    def owns(self, thing: Any) -> bool:
        """Whether a class or function was written in the plug-in's module, or the package that it stands in."""
        return _top(str(thing.__module__)) == _top(self.module.__name__)

    def values(self, kind: type) -> dict[str, Any]:
        """Return what of a kind stands in the module, by name."""
        found = {name: value for name, value in vars(self.module).items() if isinstance(value, kind)}
        return dict({id(value): (name, value) for name, value in found.items()}.values())


LOADED: dict[str, Loaded] = {}
"""The plug-ins of this process, by name."""


def load_installed() -> None:
    """Import the plug-ins of the packages that are installed.

    Raises:
        PluginError: one cannot be taken.
    """
    load(installed())


def load(plugins: Iterable[Plugin]) -> list[Loaded]:
    """Import plug-ins, and make what stands in them known to this process; one that is there already is left alone.

    Raises:
        PluginError: one cannot be imported, or something in it has the name or id of what there is, or names what
            there is not.
    """
    return [LOADED[plugin.name] if plugin.name in LOADED else _load(plugin) for plugin in plugins]


def _load(plugin: Plugin) -> Loaded:
    before = {i: p.check for i, p in catalogue().items()}  # ours are there first: who comes second is to blame
    if plugin.name in LIBRARIES:
        raise PluginError(f"the plug-in {plugin} has the name of a library that veriformer knows; rename it")
    module = _imported(plugin)
    known = catalogue()
    own = {i: p for i, p in known.items() if i not in before}
    loaded = Loaded(plugin, module, own)
    own |= {i: p for i, p in known.items() if i in before and loaded.owns(p.check)}  # imported by hand before
    faults, canaries = loaded.values(Fault), loaded.values(Canary)
    for what in (*_not_there(own, known), *_of_other_properties(faults, canaries, known), *_taken(faults, canaries),
                 *_of_other_types(module)):  # fmt: skip
        raise PluginError(f"the plug-in {plugin} cannot be taken: {what}")
    FAULTS.update({fault.name: fault for fault in faults.values()})
    CANARIES.extend(canary for canary in canaries.values() if canary not in CANARIES)
    if hasattr(module, "recognise"):
        RECOGNISERS[plugin.name] = module.recognise
    if hasattr(module, "SHIPPED"):
        LIBRARIES[plugin.name] = Library((), plugin=module.__name__)
    LOADED[plugin.name] = loaded
    return loaded


def _imported(plugin: Plugin) -> ModuleType:
    try:
        if plugin.folder and plugin.folder not in sys.path:
            sys.path.append(plugin.folder)
            sys.meta_path.insert(0, Beside(plugin.folder))  # what Python itself calls so is left to Python
        return importlib.import_module(plugin.module)
    except ModuleNotFoundError as problem:
        if f"{plugin.module}.".startswith(f"{problem.name}."):
            where = f" beside {plugin.origin}" if plugin.folder else ""
            raise PluginError(f"the plug-in {plugin} is not there: no module {problem.name!r}{where}") from None
        raise _broken(plugin, problem) from problem
    except BaseException as problem:
        if not is_its_own(problem):
            raise
        raise _broken(plugin, problem) from problem


def _broken(plugin: Plugin, problem: BaseException) -> PluginError:
    if isinstance(problem, SyntaxError):
        return PluginError(
            f"the plug-in {plugin} cannot be imported: SyntaxError: {problem.msg} "
            f"({Path(problem.filename or plugin.module).name}, line {problem.lineno})"
        )
    ours = str(Path(__file__).parent)
    frames = [f for f in traceback.extract_tb(problem.__traceback__)
              if "importlib" not in f.filename and not f.filename.startswith(ours)]  # fmt: skip
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    hidden = shadow(problem)
    return PluginError(
        f"the plug-in {plugin} cannot be imported: {told(problem)}{where}{f'; {hidden}' if hidden else ''}"
    )


def _not_there(own: Mapping[str, Property], known: Mapping[str, Property]) -> Iterator[str]:
    for prop in own.values():
        for needed in prop.requires:
            if needed not in known:
                yield f"its property {prop.id} requires {needed!r}, which does not exist"


def _of_other_properties(
    faults: Mapping[str, Fault], canaries: Mapping[str, Canary], known: Mapping[str, Property]
) -> Iterator[str]:
    both: dict[str, Fault | Canary] = {**faults, **canaries}
    for name, broken in both.items():
        for prop in broken.noticed_by:
            if prop not in known:
                yield f"{name} is to be noticed by {prop!r}, which does not exist"


def _taken(faults: Mapping[str, Fault], canaries: Mapping[str, Canary]) -> Iterator[str]:
    both: dict[str, Fault | Canary] = {**faults, **canaries}
    there: dict[str, Fault | Canary] = {**FAULTS, **{canary.name: canary for canary in CANARIES}}
    for name, broken in both.items():
        if there.get(broken.name, broken) is not broken:  # one plug-in may import what another holds
            yield f"{name} has the name {broken.name!r}, which another has; choose another"


def _of_other_types(module: ModuleType) -> Iterator[str]:
    if not callable(getattr(module, "recognise", len)):
        yield f"its recognise is {module.recognise!r}; a function recognise(thing, kind) is required"
    if not isinstance(getattr(module, "SHIPPED", {}), Mapping):
        yield f"its SHIPPED is a {type(module.SHIPPED).__name__}; subjects by their names are required"


def _top(dotted: str) -> str:
    return dotted.partition(".")[0]
