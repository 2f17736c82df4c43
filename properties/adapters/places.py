"""Where a user's file stands: the folder that its imports are found from, and the name that it is imported by."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import sysconfig
from dataclasses import dataclass
from importlib import machinery
from pathlib import Path
from types import ModuleType

_INSTALLED = tuple({f"{Path(folder).resolve()}/" for name, folder in sysconfig.get_paths().items() if "lib" in name})
PACKAGES = ("/site-packages/", "/dist-packages/")  # a person's own, a distribution's


class Beside:
    """Finds what lies beside a user's file before all else of that name, as `python file.py` does.

    What Python itself calls so is left to Python, and the file's own name to whoever has it: types.py, random.py or
    jax.py of a user's never comes to a library that means another one.
    """

    def __init__(self, folder: str, own: str = "") -> None:
        self.folder, self.own = folder, own

    def find_spec(self, name: str, path: object = None, target: object = None) -> machinery.ModuleSpec | None:
        """Return where a module lies; of a package's own modules it knows nothing."""
        if path is not None or name == self.own or name in sys.stdlib_module_names:
            return None
        found = machinery.PathFinder.find_spec(name, [self.folder])
        return None if found is None or found.loader is None else found  # a bare folder comes last, as everywhere


@dataclass(frozen=True)
class Place:
    """Where a file stands.

    Attributes:
        path: of the file.
        folder: that its imports are found from: its own, or the one above the topmost package that it lies in.
        name: dotted name below the folder; of a file in no package its stem.
    """

    path: Path
    folder: Path
    name: str

    @classmethod
    def of(cls, path: Path) -> Place:
        """Look where a file stands: a folder with an `__init__.py` is a package.

        >>> Place.of(Path("/nowhere/model.py")).name
        'model'
        """
        path = path.resolve()
        names = [] if path.stem == "__init__" else [path.stem]
        folder = path.parent
        while (folder / "__init__.py").is_file() and folder.name.isidentifier() and "." not in path.stem:
            names.insert(0, folder.name)
            folder = folder.parent
        return cls(path, folder, ".".join(names) or path.stem)

    @classmethod
    def of_module(cls, module: ModuleType, file: str) -> Place:
        """Look where a module stands that was imported by a dotted name; packages may lack their `__init__.py`."""
        path, names = Path(file).resolve(), module.__name__.split(".")
        parts = (path.parent if path.stem == "__init__" else path.with_suffix("")).parts
        if len(names) > 1 and list(parts[-len(names) :]) == names:
            return cls(path, Path(*parts[: -len(names)]), module.__name__)
        return cls.of(path)

    def as_part_of_a_package(self) -> Place | None:
        """Return where it stands if its folders are packages though they have no `__init__.py`: its imports say so."""
        dots = re.findall(r"^\s*from\s+(\.+)", self.path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        levels = max((len(d) for d in dots), default=0)
        parts = self.path.with_suffix("").parts
        names = parts[-1 - levels :]
        if not levels or len(parts) <= levels + 1 or not all(name.isidentifier() for name in names):
            return None
        return Place(self.path, Path(*parts[: -1 - levels]), ".".join(names))

    @property
    def top(self) -> Path:
        """The file of the topmost package; the file itself if it lies in none."""
        return self.folder / self.name.partition(".")[0] / "__init__.py" if self.is_in_package else self.path

    @property
    def is_in_package(self) -> bool:
        """Whether the name is the one that others import the file by."""
        return self.folder != self.path.parent

    @property
    def inner(self) -> list[str]:
        """The names below the topmost package."""
        return self.name.split(".")[1:] if self.is_in_package else []

    @property
    def own(self) -> str:
        """The name that the file would hide from the libraries it imports; "" for one in a package."""
        return "" if self.is_in_package else self.path.stem

    @property
    def is_taken(self) -> bool:
        """Whether the topmost package has the name of one that Python or a library has and that is imported."""
        top = self.name.partition(".")[0]
        return top in sys.stdlib_module_names or (top in sys.modules and is_of_a_library(sys.modules[top]))

    @property
    def alias(self) -> str:
        """A name that nobody else has, for the file or for the topmost package of it."""
        stem = re.sub(r"\W", "_", self.name.partition(".")[0] if self.is_in_package else self.path.stem)
        return f"{stem}_{hashlib.sha256(str(self.top).encode()).hexdigest()[:8]}"


def root_of(name: str, file: Path) -> Path | None:
    """Return the nearest folder above a file in which the top of a dotted name lies; None where none has it."""
    top = name.partition(".")[0]
    for folder in file.parents:
        if (folder / f"{top}.py").is_file() or any((folder / top).glob("*.py")) or any((folder / top).glob("*/*.py")):
            return folder
    return None


def location(module: object) -> str:
    """Return the file of a module, or the folder of a package without one, or ""; nothing is made to load by asking."""
    known = getattr(module, "__dict__", {})
    try:
        return str(known.get("__file__") or next(iter(known.get("__path__") or ()), ""))
    except Exception:  # what stands in `sys.modules` is anybody's object
        return ""


def is_of_a_library(module: object) -> bool:
    """Whether a module belongs to Python or to what is installed beside it, rather than to a user."""
    return lies_in_a_library(location(module))


@functools.cache  # every property that is judged asks it of hundreds of modules
def lies_in_a_library(file: str) -> bool:
    """Whether a file lies where Python, or what is installed beside it, lies."""
    return not file or any(part in file for part in PACKAGES) or str(Path(file).resolve()).startswith(_INSTALLED)
