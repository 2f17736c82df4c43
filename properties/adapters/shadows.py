"""A user's file that has the name of a module of Python's or of a library, where that broke an import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import machinery
from pathlib import Path
from types import ModuleType

from veriformer.properties.adapters.places import is_of_a_library, lies_in_a_library


def shadow(problem: BaseException) -> str:
    """Return one sentence about the file of a user's whose name stood in the way of an import, or "".

    Args:
        problem: what the import raised, in the home that it was tried in.
    """
    for name in _named(problem):
        for file in _files(name):
            if name not in sys.stdlib_module_names and not _is_installed(name):
                continue
            owner = f"{'Python' if name in sys.stdlib_module_names else 'the installed library'}'s own {name!r}"
            if is_of_a_library(sys.modules.get(name)):
                return f"{file} has the name of {owner}, which is imported instead; rename the file"
            return f"{file} is imported instead of {owner}; rename the file"
    return ""


def _named(problem: BaseException) -> Iterator[str]:
    """Yield the topmost names of the modules that an exception, or what it came of, speaks of; then all of the user's.

    A library may tell no more of what it could not import than that its own name is not there.
    """
    seen: list[BaseException] = []
    one: BaseException | None = problem
    while one is not None and one not in seen:
        seen.append(one)
        if isinstance(one, ImportError) and isinstance(one.name, str):
            yield one.name.partition(".")[0]
        if isinstance(one, AttributeError) and isinstance(one.obj, ModuleType):
            yield one.obj.__name__.partition(".")[0]
        one = one.__cause__ or one.__context__
    if any(isinstance(one, ImportError) for one in seen):
        yield from [n for n, module in list(sys.modules.items()) if "." not in n and not is_of_a_library(module)]


def _files(name: str) -> Iterator[str]:
    """Yield what a user has of that name where imports look."""
    for folder in dict.fromkeys(sys.path):
        if _is_of_libraries(folder):
            continue
        for file in (f"{name}.py", f"{name}/__init__.py"):
            if (Path(folder) / file).is_file():
                yield str(Path(Path(folder).name) / file)


def _is_installed(name: str) -> bool:
    return machinery.PathFinder.find_spec(name, [folder for folder in sys.path if _is_of_libraries(folder)]) is not None


def _is_of_libraries(folder: str) -> bool:
    return lies_in_a_library(str(Path(folder).absolute() / "anything.py"))
