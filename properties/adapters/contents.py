"""What of a user's file could be judged, and the one thing in it that is meant where only the file is named."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from veriformer.properties.adapters.target import TargetError

MOST = 6
"""Things of one file that are judged without being named."""


def contents_of(module: ModuleType) -> dict[str, tuple[str, Any]]:
    """Return what stands in a module and could be judged, by name: what it is in words, and the thing itself."""
    from torch import nn

    from veriformer.properties.adapters.functions import is_a_softmax, takes_scores_parts
    from veriformer.properties.adapters.plain import makes_a_module
    from veriformer.properties.subject.subject import Subject

    found: dict[str, tuple[str, Any]] = {}
    for name, thing in vars(module).items():
        is_own = getattr(thing, "__module__", None) == module.__name__
        if name.startswith("_"):
            continue
        if isinstance(thing, Subject):
            found[name] = (f"Subject, {thing.kind}", thing)
        elif isinstance(thing, nn.Module):
            found[name] = (f"instance of {type(thing).__name__}", thing)
        elif isinstance(thing, type) and is_own and issubclass(thing, nn.Module):
            found[name] = (f"class, takes {_signature(thing)}", thing)
        elif is_own and makes_a_module(thing):
            found[name] = (f"function that makes a model, takes {_signature(thing)}", thing)
        elif is_own and inspect.isfunction(thing) and _is_of_tensors(thing):
            asks = "" if takes_scores_parts(thing) or is_a_softmax(thing) else "; give --kind"
            found[name] = (f"function, takes {_signature(thing)}{asks}", thing)
    return found


def those_in(module: ModuleType, place: str) -> tuple[list[str], str]:
    """Return the names of what is meant by a file, and a note that says so.

    Subjects come first, then instances that are no part of another, then what makes models and is no part of what else
    could be judged. One thing under two names is one.

    Raises:
        TargetError: nothing in it could be judged, or more than one would judge at once; the message lists them.
    """
    found = contents_of(module)
    if not found:
        raise TargetError(f"{place} holds no class, instance, Subject or function that could be judged", is_usage=True)
    makers = [n for n, (told, _) in found.items() if told.startswith(("class", "function that"))]
    ranks = [
        [n for n, (told, _) in found.items() if told.startswith("Subject")],
        _whole(found, [n for n, (told, _) in found.items() if told.startswith("instance")]),
        [n for n in makers if not _used(n, module, found)],
        makers,
        [n for n in found if not _used(n, module, found)],
    ]
    best = next((names for names in ranks if names), [])
    if len(best) > MOST:
        width = max(len(name) for name in found)
        listed = "\n".join(f"  {place}:{name:{width}s}  {told}" for name, (told, _) in found.items())
        raise TargetError(
            f"{place} holds {len(found)} things that could be judged; name one of them:\n{listed}", is_usage=True
        )
    others = [name for name in found if all(found[name][1] is not found[one][1] for one in best)]
    beside = f"; also there: {', '.join(others)}" if others else ""
    if len(best) == 1:
        return best, f"of {place}, {best[0]} is judged ({found[best[0]][0]}){beside}"
    return best, f"of {place}, {', '.join(best[:-1])} and {best[-1]} are judged, which nothing else is made of{beside}"


def _whole(found: dict[str, tuple[str, Any]], names: list[str]) -> list[str]:
    """Return the instances that are no part of another one, each under the first of its names."""
    parts = {id(part) for name in names for part in list(found[name][1].modules())[1:]}
    seen: set[int] = set()
    kept = []
    for name in names:
        thing = found[name][1]
        if id(thing) not in seen and id(thing) not in parts:
            kept.append(name)
        seen.add(id(thing))
    return kept


def _signature(thing: Any) -> str:
    try:
        return str(inspect.signature(thing).replace(return_annotation=inspect.Signature.empty))[:100]
    except (TypeError, ValueError):
        return "(...)"


def _is_of_tensors(function: Any) -> bool:
    """Whether a function's first arguments are called as those of attention, a softmax or a loss are."""
    from veriformer.properties.adapters.functions import is_a_softmax, takes_scores_parts

    first = list(inspect.signature(function).parameters)[:1]
    return takes_scores_parts(function) or is_a_softmax(function) or first in (["scores"], ["logits"])


def _used(name: str, module: ModuleType, found: dict[str, tuple[str, Any]]) -> bool:
    """Whether something else that could be judged is made of a name, by way of functions or ready-made."""
    return any(name in _reached(other, module) or name in _taken(found[other][1]) for other in found if other != name)


def _taken(thing: Any) -> set[str]:
    """Return the names of the classes of the modules that a constructor takes, as far as types and names tell."""
    from veriformer.properties.adapters.constructing.ready_made import class_of_part

    if not isinstance(thing, type):
        return set()
    parameters = inspect.signature(thing).parameters.values()
    classes = [class_of_part(thing, p.name, None if p.annotation is p.empty else p.annotation) for p in parameters]
    return {cls.__name__ for cls in classes if cls is not None}


def _reached(start: str, module: ModuleType) -> set[str]:
    """Return the names of a module that the code behind one of them uses, and those that these use."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        thing = vars(module).get(waiting.pop())
        if getattr(thing, "__module__", None) == module.__name__:
            new = {n for n in _names(thing) if n in vars(module)} - reached
            reached |= new
            waiting += new
    return reached


def _names(thing: Any) -> Iterator[str]:
    thing = inspect.unwrap(thing) if callable(thing) and not isinstance(thing, type) else thing
    if isinstance(thing, type):
        yield from (base.__name__ for base in thing.__bases__)
        for part in vars(thing).values():
            part = getattr(part, "fget", None) or getattr(part, "__func__", part)
            yield from _names(part) if not isinstance(part, type) else ()
    elif (code := getattr(thing, "__code__", None)) is not None:
        yield from _of_code(code)


def _of_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant)
