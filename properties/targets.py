"""From a word on the command line to subjects: `package.module:attribute`, `path/file.py:attribute`, a shipped name."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from veriformer.properties.adapters.target import FILE, LIBRARY, Target, TargetError

if TYPE_CHECKING:
    from veriformer.properties.subject.subject import Subject


def load(target: str) -> list[Subject]:
    """Return the subjects that a target names.

    Args:
        target: `reference` or `torch` for all shipped subjects of that library, `reference:decoder-rotary` for one,
            `package.module:attribute` or `path/file.py:attribute` for anybody's: a Subject, a factory of one or of
            several (`attribute[2]` for one of them), a module class, or an instance.

    Raises:
        TargetError: it names nothing that can be checked.
    """
    word = Target.parse(target)
    if word.kind == LIBRARY:
        return _shipped(word.place, word.attribute)
    module = _load_file(word.place) if word.kind == FILE else _import(word.place)
    all_of_it = replace(word, index=None)
    found = _made(_attribute(module, word.attribute, word.place), str(all_of_it))
    found = [replace(s, name=word.attribute) if s.name == s.kind else s for s in found]  # built by a lambda: no name
    if len(found) > 1:
        found = [replace(s, target=str(replace(word, index=i))) for i, s in enumerate(found)]
    else:
        found = [replace(s, target=str(all_of_it)) for s in found]
    return found if word.index is None else [_one_of(found, word)]


def _one_of(found: list[Subject], word: Target) -> Subject:
    assert word.index is not None
    if word.index >= len(found):
        raise TargetError(
            f"{replace(word, index=None)} gives {len(found)} subject{'s' * (len(found) != 1)}; there is no "
            f"[{word.index}]: they are counted from 0",
            is_usage=True,
        )
    return found[word.index]


def _shipped(group: str, name: str) -> list[Subject]:
    from veriformer.properties.adapters.recognising import MissingLibraryError, shipped

    try:
        known = shipped(group)
    except MissingLibraryError as problem:
        raise TargetError(str(problem)) from problem
    names = [name] if name else list(known)
    try:
        return [replace(known[n], target=f"{group}:{n}") for n in names]
    except KeyError:
        listed = ", ".join(list(known)[:30]) + (", ..." if len(known) > 30 else "")
        raise TargetError(
            f"{group} has no subject {name!r}; {_nearest(name, known)}it has: {listed}", is_usage=True
        ) from None
    except Exception as problem:  # of the library itself, when it is asked for a class
        raise TargetError(f"{group}:{name or '*'} cannot be made: {_blame(problem)}") from problem


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _import(name: str) -> ModuleType:
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except Exception as problem:
        raise TargetError(f"{name!r} cannot be imported: {_blame(problem)}") from problem
    finally:
        if added:
            sys.path.remove(here)


def _load_file(place: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise TargetError(f"there is no file {place!r}; give the path of a Python file, then :attribute", is_usage=True)
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{place!r} cannot be loaded as Python; give a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        del sys.modules[name]
        raise TargetError(f"{place!r} cannot be imported: {_blame(problem)}") from problem
    finally:
        sys.path.remove(str(path.parent))
    return module


def _blame(problem: BaseException) -> str:
    """Name the error and the line of the user's code that it comes from."""
    if isinstance(problem, SyntaxError):
        return f"SyntaxError: {problem.msg} ({Path(problem.filename or '?').name}, line {problem.lineno})"
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if "importlib" not in f.filename]
    ours = str(Path(__file__).parent)
    frames = [f for f in frames if not f.filename.startswith(ours)]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    line = (str(problem).strip() or "no message").splitlines()[0]
    return f"{type(problem).__name__}: {line}{where}"


def _attribute(module: ModuleType, attribute: str, place: str) -> Any:
    thing: Any = module
    for part in attribute.split("."):
        if not hasattr(thing, part):
            public = [n for n in vars(module) if not n.startswith("_")]
            has = ", ".join(public) or "nothing public"
            raise TargetError(
                f"{place} has no attribute {part!r}; {_nearest(part, public)}it has: {has}", is_usage=True
            )
        thing = getattr(thing, part)
    return thing


def _made(thing: Any, target: str) -> list[Subject]:
    from veriformer.properties.adapters.recognising import as_subject
    from veriformer.properties.subject.subject import Subject

    if callable(thing) and not isinstance(thing, type) and not _is_module(thing) and not isinstance(thing, Subject):
        try:
            return [as_subject(thing)]
        except TypeError:
            thing = _called(thing, target)
    many = thing if isinstance(thing, list | tuple) else [thing]
    try:
        return [as_subject(one) for one in many]
    except (TypeError, ValueError) as problem:
        raise TargetError(f"{target}: {problem}") from problem


def _is_module(thing: Any) -> bool:
    import torch

    return isinstance(thing, torch.nn.Module)


def _called(factory: Any, target: str) -> Any:
    try:
        return factory()
    except Exception as problem:
        raise TargetError(
            f"{target} is a function that was called to make a subject, and raised {_blame(problem)}; "
            "a factory takes no argument and returns a Subject"
        ) from problem
