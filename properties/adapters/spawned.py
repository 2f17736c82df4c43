"""Processes that a user's file starts afresh (`spawn`, `forkserver`) import that file by the name that it has here.

A file is loaded by a name of its own making (`Place.alias`), which no new interpreter knows, so that functions and
classes of the file could not be unpickled there. Such a process runs what its parent names as its main module before
anything is unpickled: this one, which looks for those names.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from veriformer.properties.adapters.places import Beside, Place, lies_in_a_library

_ALIAS = re.compile(r"\w+_[0-9a-f]{8}")


class Aliases:
    """Finds a user's file by the name that it was loaded by in the process that started this one."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return where the file lies; what is found beside it comes first from then on, as there."""
        if path is not None or not _ALIAS.fullmatch(name):
            return None
        for place in _places():
            if place.alias == name:
                sys.meta_path.insert(0, Beside(str(place.folder), place.own))
                return importlib.util.spec_from_file_location(name, place.top)
        return None


def _places() -> Iterator[Place]:
    """Yield every file that could be meant: those in the user's folders of the path, and the packages there."""
    for folder in dict.fromkeys(sys.path):
        if not lies_in_a_library(str(Path(folder).absolute() / "anything.py")):
            yield from map(Place.of, [*Path(folder).glob("*.py"), *Path(folder).glob("*/__init__.py")])


def announce() -> None:
    """Let the processes that this one starts afresh look for aliases; not where it runs somebody's own program."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is None and getattr(main, "__file__", None) is None:
        main.__spec__ = ModuleSpec("veriformer.properties.adapters.spawned", loader=None)


if __name__ == "__mp_main__":
    sys.meta_path.append(Aliases())
