"""From a word on the command line to subjects: `package.module:attribute`, `path/file.py:attribute`, a shipped name."""

from __future__ import annotations

import difflib
import importlib
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from veriformer.properties.adapters.contents import those_in
from veriformer.properties.adapters.homes import Home, Surroundings, home_at, is_home
from veriformer.properties.adapters.places import Place
from veriformer.properties.adapters.shadows import shadow
from veriformer.properties.adapters.target import FILE, LIBRARY, Target, TargetError

if TYPE_CHECKING:
    from veriformer.properties.subject.subject import Subject


def load(
    target: str, base: Path | None = None, *, kind: str | None = None, declares: Mapping[str, Any] | None = None
) -> list[Subject]:
    """Return the subjects that a target names.

    Args:
        target: `reference` or `torch` for all shipped subjects of that library, `reference:decoder-rotary` for one,
            `package.module:attribute` or `path/file.py:attribute` for anybody's: a Subject, a factory of one or of
            several (`attribute[2]` for one of them), a module class, or an instance. `path/file.py` alone for what
            can be judged in it and nothing else in it is made of, if that is not too much.
        base: folder that relative paths start from; None for the current one.
        kind: what it is, where that cannot be told, or is told wrong; a key of `KINDS`.
        declares: facts to declare beside those that it has.

    Raises:
        TargetError: it names nothing that can be checked.
    """
    word = Target.parse(target)
    if word.kind == LIBRARY:
        return [_declaring(s, kind, declares) for s in _shipped(word.place, word.attribute)]
    note = ""
    with _opened(word, base) as (module, _):
        names = [word.attribute]
        if word.kind == FILE and not word.attribute:
            names, note = those_in(module, word.place)
        made, refused = _each(module, word, names, kind)
    found = [one for name, subjects in made.items() for one in _placed(subjects, replace(word, attribute=name))]
    found = [_declaring(s, kind, declares) for s in found]
    notes = tuple(told for told in (note, *refused) if told)
    found = [replace(s, notes=(*notes, *s.notes)) if not at and notes else s for at, s in enumerate(found)]
    return found if word.index is None else [_one_of(found, word)]


def _each(
    module: ModuleType, word: Target, names: list[str], kind: str | None
) -> tuple[dict[str, list[Subject]], list[str]]:
    """Return the subjects of each name, and what is said of those that cannot be judged where another can."""
    made: dict[str, list[Subject]] = {}
    problems: list[TargetError] = []
    for name in names:
        target = str(replace(word, attribute=name, index=None))
        try:
            made[name] = _made(_attribute(module, name, word.place), target, kind)
        except TargetError as problem:
            problems.append(problem)
    if not made:
        raise problems[0]
    return made, [f"not judged: {str(problem).splitlines()[0]}" for problem in problems]


def _placed(found: list[Subject], word: Target) -> list[Subject]:
    """Return subjects with the targets by which others load them."""
    all_of_it = replace(word, index=None)
    found = [replace(s, name=word.attribute) if s.name == s.kind else s for s in found]  # built by a lambda: no name
    if len(found) > 1:
        return [replace(s, target=str(replace(word, index=i))) for i, s in enumerate(found)]
    return [replace(s, target=str(all_of_it)) for s in found]


@contextmanager
def _opened(word: Target, base: Path | None) -> Iterator[tuple[ModuleType, Path]]:
    """Run the block with the module of a target imported, in its home; yield it with the folder of the home."""
    folder, place = _stands(word, base)
    with home_at(folder).entered(place):
        surroundings = Surroundings()
        module = _imported(word, home_at(folder), place)
        surroundings.put_back()
        yield module, folder


@contextmanager
def named_by(target: str, base: Path | None = None) -> Iterator[tuple[Any, ModuleType, Path]]:
    """Run the block with what a target names, as it is, its module and the folder that its imports start from.

    Raises:
        TargetError: it names nothing, or a library.
    """
    word = Target.parse(target)
    if word.kind == LIBRARY:
        raise TargetError(f"{target!r} is a library; give package.module:attribute or path/file.py:attribute")
    with _opened(word, base) as (module, folder):
        yield _attribute(module, word.attribute, word.place), module, folder


@contextmanager
def at_home(target: str, base: Path | None = None) -> Iterator[None]:
    """Run the block as if nothing but this target had been loaded: what its code imports then is its own.

    Args:
        target: of a subject; one that was not loaded, or is of a library, needs no home.
        base: as for `load`.
    """
    try:
        word = Target.parse(target)
        folder, place = (None, None) if word.kind == LIBRARY else _stands(word, base)
    except TargetError:
        folder = None
    with home_at(folder).entered(place) if folder is not None and is_home(folder) else nullcontext():
        yield


def _stands(word: Target, base: Path | None) -> tuple[Path, Place | None]:
    """Return the folder that the imports of a target start from, and where its file stands."""
    if word.kind != FILE:
        return (base or Path.cwd()).resolve(), None
    path = Path(word.place) if base is None else base / word.place
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError:  # a name that is too long
        is_file = is_folder = False
    if not is_file:
        wrong = f"{word.place!r} is a folder" if is_folder else f"there is no file {word.place!r}"
        raise TargetError(f"{wrong}; give the path of a Python file, then :attribute", is_usage=True)
    place = Place.of(path)
    return place.folder, place


def _imported(word: Target, home: Home, place: Place | None) -> ModuleType:
    from veriformer.properties.bench.guards import is_its_own

    try:
        return importlib.import_module(word.place) if place is None else home.load(place)
    except BaseException as problem:
        if not is_its_own(problem):
            raise
        missing = isinstance(problem, ModuleNotFoundError) and f"{word.place}.".startswith(f"{problem.name}.")
        raise TargetError(
            f"{word.place!r} cannot be imported: {_blame(problem)}", is_usage=missing and place is None
        ) from problem


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
    except TargetError:  # of a folder that it should be loaded from
        raise
    except Exception as problem:  # of the library itself, when it is asked for a class
        raise TargetError(f"{group}:{name or '*'} cannot be made: {_blame(problem)}") from problem


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _blame(problem: BaseException) -> str:
    """Name the error and the line of the user's code that it comes from."""
    from veriformer.properties.bench.guards import last_frames
    from veriformer.properties.subject.raised import told

    if isinstance(problem, SyntaxError):
        where = f" ({Path(problem.filename).name}, line {problem.lineno})" if problem.filename else ""
        return f"SyntaxError: {problem.msg}{where}"
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if "importlib" not in f.filename]
    ours = str(Path(__file__).parent.parent)
    frames = [f for f in frames if not f.filename.startswith((ours, "<"))]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    hidden = shadow(problem)
    return f"{told(problem)}{where}{f'; {hidden}' if hidden else ''}{last_frames(problem)}"


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


def _declaring(subject: Subject, kind: str | None, declares: Mapping[str, Any] | None) -> Subject:
    """Return a subject of the kind, and with the facts, that the user says."""
    if kind is not None and kind != subject.kind:
        raise TargetError(
            f"{subject.name} is a Subject of kind {subject.kind!r}, and --kind was {kind!r}; leave one of them out",
            is_usage=True,
        )
    return subject.with_facts(**declares) if declares else subject


def _made(thing: Any, target: str, kind: str | None = None) -> list[Subject]:
    from veriformer.properties.adapters.plain import makes_a_module
    from veriformer.properties.adapters.recognising import as_subject
    from veriformer.properties.bench.guards import last_frames
    from veriformer.properties.subject.subject import Subject

    if callable(thing) and not isinstance(thing, type) and not _is_module(thing) and not isinstance(thing, Subject):
        try:
            return [as_subject(thing, kind=kind)]
        except TypeError:
            if makes_a_module(thing):
                return _made([thing], target, kind)
            thing = _called(thing, target)
    many = (
        {f"{target}[{i}]": one for i, one in enumerate(thing)} if isinstance(thing, list | tuple) else {target: thing}
    )
    found = []
    for place, one in many.items():
        try:
            found.append(as_subject(one, kind=kind))
        except (TypeError, ValueError) as problem:
            hidden = shadow(problem)
            said = f"{place}: {problem}{f'; {hidden}' if hidden else ''}{last_frames(problem)}"
            raise TargetError(said) from problem
    return found


def _is_module(thing: Any) -> bool:
    import torch

    return isinstance(thing, torch.nn.Module)


def _called(factory: Any, target: str) -> Any:
    from veriformer.properties.adapters.functions import asked_for_kind
    from veriformer.properties.bench.guards import is_its_own

    if told := asked_for_kind(factory, target):
        raise TargetError(told)
    try:
        return factory()
    except BaseException as problem:
        if not is_its_own(problem):
            raise
        raise TargetError(
            f"{target} is a function that was called to make a subject, and raised {_blame(problem)}; "
            "a factory takes no argument and returns a Subject"
        ) from problem
