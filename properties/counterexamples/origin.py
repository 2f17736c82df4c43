"""How a script gets at the subject: imported as the target says, or its functions pasted."""

from __future__ import annotations

import inspect
import keyword
import sys
import types
from collections.abc import Iterable
from importlib import machinery
from pathlib import Path
from typing import Any

from torch import nn

from veriformer.properties.adapters.huggingface_checkpoints import is_folder
from veriformer.properties.adapters.places import PACKAGES, Beside, Place, is_of_a_library, location
from veriformer.properties.adapters.target import FILE, LIBRARY, Target, TargetError
from veriformer.properties.adapters.unknown.written import USER, module_behind, source_of
from veriformer.properties.bench.pool import callable_subject
from veriformer.properties.counterexamples.program import UnwritableError
from veriformer.properties.counterexamples.source import Sources
from veriformer.properties.subject.subject import Subject

_MANY = 200  # files beside a user's that are looked at

_STAND_IN = """
try:
    import veriformer.properties  # the file declares a Subject
except ImportError:  # where it is not installed a plain record does
    record = type("Subject", (types.SimpleNamespace,), {"__getattr__": lambda self, name: None})
    stub = mock.MagicMock(Subject=record, DrawnConfig=record)
    sys.modules["veriformer"] = sys.modules["veriformer.properties"] = stub.properties = stub
"""

_HERE = """
# {file}: from the folder that this is run in, or from one above this script
here = [Path.cwd(), *Path(__file__).resolve().parents]
folder = next((str({folder}) for f in here if (f / {file!r}).is_file()), "")
"""

_PLAIN = """
sys.path.insert(0, folder)
"""

_BESIDE = """
sys.meta_path.insert(0, {beside}(folder, {own!r}))
sys.path += [folder]
"""

_FILE = """
spec = importlib.util.spec_from_file_location({name!r}, Path(folder, {path!r}))
user = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = user
spec.loader.exec_module(user)
"""


def where_from(subject: Subject, parts: Iterable[str], sources: Sources) -> str:
    """Return source that defines the parts of a subject that a script uses, and its build or its module.

    Args:
        subject: that was judged.
        parts: names of its callables, "build" or "module" among them, and "backends".
        sources: gets the functions that have to be pasted.

    Raises:
        UnwritableError: it stands nowhere, and was made of functions without a source of their own.
    """
    module, given, expression = _given(subject)
    behind = next((m for part in (subject.build, subject.forward) if (m := module_behind(part)) is not None), None)
    if behind is not None:
        module = behind
        sources.claim(USER, behind)
    if module is not None and source_of(subject.forward) is None and _is_subject(given, subject):
        lines = [_importing(module, sources), f"subject = {expression}"]
        given = {part: getattr(subject, part) for part in parts}
        own = [p for p, value in given.items() if getattr(value, "__module__", None) != callable_subject.__module__]
        lines += [f"{', '.join(own)} = {', '.join(f'subject.{part}' for part in own)}"] * bool(own)
        lines += [f"{part} = {sources.expression(value)}" for part, value in given.items() if part not in own]
        return "\n".join(lines)
    if given is not None:
        sources.know(given, expression)
    lines = [] if module is None else [_importing(module, sources)]
    for part in parts:
        value = getattr(subject, part)
        if part == "module" and (folder := _checkpoint(subject)):
            released = sources.expression(type(value))
            lines.append(f"module = {released}.from_pretrained({folder!r}, local_files_only=True, dtype='auto')")
        elif part == "module":
            if given is not value and not inspect.isroutine(given):
                raise UnwritableError("an instance that stands in no module")
            lines.append(f"module = {expression}")
        else:
            called = sources.expression(value)
            lines += [f"{part} = {called}"] * (called != part)
    return "\n".join(lines)


def _checkpoint(subject: Subject) -> str:
    """Return the folder of the checkpoint that a target names; empty for any other target."""
    library, _, name = subject.target.partition(":")
    if library != "hf" or not is_folder(name) or not hasattr(type(subject.module), "from_pretrained"):
        return ""
    return str(Path(name).resolve())


def _given(subject: Subject) -> tuple[types.ModuleType | None, Any, str]:
    """Return the module that a subject was taken from, what was found there, and the expression that gives it."""
    module, place = _loaded(subject) if subject.target else _found(subject)
    if module is None or place is None:
        return None, None, ""
    thing: Any = module
    for name in place.attribute.split("."):
        thing = getattr(thing, name, None)
    expression = f"user.{place.attribute}"
    if inspect.isroutine(thing):
        expression += "()"
    if place.index is None:
        return module, thing, expression
    one = thing[place.index] if isinstance(thing, list | tuple) else thing
    return module, one, f"{expression}[{place.index}]"


def _is_subject(given: Any, subject: Subject) -> bool:
    """Whether what the target names is a subject, rather than something that an adapter made one of."""
    if not inspect.isroutine(given):
        return isinstance(given, Subject)
    adapted = getattr(subject.forward, "__module__", "").startswith("veriformer.properties.adapters")
    return subject.module is None or not adapted


def _loaded(subject: Subject) -> tuple[types.ModuleType | None, Target | None]:
    """Return the module that a target names, as it was loaded."""
    try:
        target = Target.parse(subject.target)
    except TargetError:
        return None, None
    if target.kind == LIBRARY:
        return None, None
    if target.kind == FILE:
        path = Path(target.place).resolve()
        files = (m for m in list(sys.modules.values()) if getattr(m, "__file__", None))
        return next((m for m in files if Path(str(m.__file__)).resolve() == path), None), target
    return sys.modules.get(target.place), target


def _found(subject: Subject) -> tuple[types.ModuleType | None, Target | None]:
    """Look for a subject without a target where its functions stand."""
    for part in (subject.build, subject.forward, type(subject.module)):
        module = sys.modules.get(getattr(part, "__module__", None) or "")
        if module is None or module.__name__.startswith("veriformer.properties"):
            continue
        for name, value in vars(module).items():
            if _is_the_same(value, subject) or (value is subject.module and isinstance(value, nn.Module)):
                return module, Target("module", module.__name__, name)
    return None, None


def _is_the_same(value: object, subject: Subject) -> bool:
    if not isinstance(value, Subject) or value.kind != subject.kind:
        return False
    forward_is_same = value.forward is subject.forward or value.forward is None
    return forward_is_same and value.build is subject.build and value.module is subject.module


def _importing(module: types.ModuleType, sources: Sources) -> str:
    """Return source that imports a module as `user`: of a library by its name, a user's own from where it stands.

    A file in no package gets a name that nobody else has, so that types.py or torch.py takes no other's place.
    """
    if is_of_a_library(module) or module.__name__.startswith("veriformer."):
        return f"import {module.__name__} as user"
    place = Place.of_module(module, location(module))
    folder = place.folder
    lines = [_STAND_IN.strip()] * _knows_us(folder)
    there = "f" if _seen(folder) == "." else f"f / {_seen(folder)!r}"
    lines.append(_HERE.format(file=_seen(place.path), folder=there).strip())
    if place.path.parent != folder:
        last = f"sys.path.append(str(Path(folder, {str(place.path.parent.relative_to(folder))!r})))"
    else:
        last = ""
    if _is_plain(place):
        return "\n".join([*lines, _PLAIN.strip(), *filter(None, [last]), _by_name(place.name, sources)])
    lines.append(_BESIDE.format(beside=sources.expression(Beside), own=place.own).strip())
    lines += filter(None, [last])
    if place.is_in_package and not place.is_taken:
        return "\n".join([*lines, _by_name(place.name, sources)])
    name = f"your_{place.alias.rpartition('_')[0]}"
    lines.append(_FILE.format(name=name, path=str(place.top.relative_to(folder))).strip())
    if place.inner:
        lines.append(_by_name(".".join([name, *place.inner]), sources))
    return "\n".join(lines)


def _seen(path: Path) -> str:
    """Return a path as it is seen from the folder that one stands in, if it lies below; else the whole of it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _is_plain(place: Place) -> bool:
    """Whether a file is imported by its name when its folder is put before all others, and takes no other's place.

    What lies beside it may hide what Python or a library calls so: types.py, torch.py.
    """
    names = place.name.split(".")
    if place.is_taken or not all(name.isidentifier() and not keyword.iskeyword(name) for name in names):
        return False
    beside = {p.stem for p in place.folder.glob("*.py")} | {p.parent.name for p in place.folder.glob("*/__init__.py")}
    elsewhere = [
        p for p in sys.path if p and Path(p).resolve() != place.folder and any(part in f"{p}/" for part in PACKAGES)
    ]
    return len(beside) < _MANY and not any(
        name in sys.stdlib_module_names or machinery.PathFinder.find_spec(name, elsewhere) for name in beside
    )


def _knows_us(folder: Path) -> bool:
    """Whether a module that was loaded from below a folder uses this package."""
    ours = (
        module for name, module in list(sys.modules.items())
        if not name.startswith("veriformer") and not is_of_a_library(module)
        and Path(location(module)).resolve().is_relative_to(folder)
    )  # fmt: skip
    return any(
        str(getattr(value, "__module__", "") or getattr(value, "__name__", "")).startswith("veriformer")
        for module in ours
        for value in list(vars(module).values())
    )


def _by_name(name: str, sources: Sources) -> str:
    if all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
        return f"import {name} as user"
    sources.imports.add("import importlib")
    return f"user = importlib.import_module({name!r})"
