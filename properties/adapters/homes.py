"""The modules of one folder, apart from those of another: `import helper` finds the helper beside the file."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from veriformer.properties.adapters.places import Beside, Place, is_of_a_library, location, root_of


class Home:
    """What was imported for the targets of one folder, there while one of them is loaded or judged.

    Attributes:
        folder: that imports are found from.
        modules: of the user's own, by name; libraries are shared with everybody.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: dict[str, ModuleType] = {}
        self._inserted: list[str] = []  # into `sys.path`, by the user's own code

    @contextmanager
    def entered(self, place: Place | None = None) -> Iterator[None]:
        """Run the block as if nothing but the targets of this folder had been loaded.

        Modules of a user's own that were imported before are put back as they were, under the names that they had; the
        modules of this home keep theirs where nobody else has it, so that they can be pickled.

        Args:
            place: of the file that is loaded or judged.
        """
        finder, path = Beside(str(self.folder), place.own if place else ""), sys.path[:]
        aside = self._foreign(finder)
        for name in aside:
            del sys.modules[name]
        sys.modules.update(self.modules)
        there = set(sys.modules)
        sys.meta_path.insert(0, finder)
        last = dict.fromkeys([str(self.folder), *([str(place.path.parent)] if place else [])])
        sys.path[:] = begun = [*self._inserted, *path, *(p for p in last if p not in path)]
        try:
            yield
        finally:
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
            self._inserted = [*(p for p in sys.path if p not in begun), *self._inserted]
            sys.path[:] = path
            self._keep(there)
            hidden = {_top(name) for name in aside}
            for name in [n for n in self.modules if _top(n) in hidden]:
                sys.modules.pop(name, None)
            sys.modules.update(aside)

    def load(self, place: Place) -> ModuleType:
        """Import a file, once, by the name that it has below the folder; call it in the home that was entered.

        A file in no package has a name of its own making, and so has a package whose name Python or a library has:
        what is imported under that name stays what it is. What it imports and nobody has is looked for in the folders
        above it, from which it may be run: `from src.model import GPT` of `src/train.py`.
        """
        while True:
            try:
                return self._loaded(place)
            except ModuleNotFoundError as problem:
                above = root_of(problem.name or "", place.path)
                if above is None or str(above) in sys.path:
                    raise
                sys.path.append(str(above))
            except ImportError as problem:  # of a folder without an `__init__.py`, whose files are siblings
                wider = place.as_part_of_a_package() if "no known parent package" in str(problem) else None
                if wider is None:
                    raise
                sys.path.append(str(wider.folder))
                return importlib.import_module(wider.name)

    def _loaded(self, place: Place) -> ModuleType:
        importlib.invalidate_caches()
        for module in self.modules.values():
            if location(module) == str(place.path) and sys.modules.get(module.__name__) is module:
                return module
        if place.is_in_package and not place.is_taken:
            return importlib.import_module(place.name)
        if place.alias not in sys.modules:
            _import_as(place.alias, place.top)
        return importlib.import_module(".".join([place.alias, *place.inner]))

    def _keep(self, there: set[str]) -> None:
        """Take note of what the block imported of the user's own."""
        ours = tuple(f"{Path(p).resolve()}/" for p in (str(self.folder), *self._inserted))
        known = {name: sys.modules[name] for name in self.modules if name in sys.modules}
        new = {name: module for name, module in sys.modules.items() if name not in there}
        self.modules = known | {
            name: module
            for name, module in new.items()
            if not is_of_a_library(module) and str(Path(location(module)).resolve()).startswith(ours)
        }

    def _foreign(self, finder: Beside) -> dict[str, ModuleType]:
        """Return the modules of other homes, and those of a user's own whose name this folder has for another file."""
        theirs = {n for home in _HOMES.values() if home is not self for n, m in home.modules.items()
                  if sys.modules.get(n) is m}  # fmt: skip
        hidden = {
            name
            for name, module in list(sys.modules.items())
            if "." not in name and not name.startswith("__") and name not in sys.stdlib_module_names
            and name != "veriformer" and not is_of_a_library(module) and self._has_another(name, module, finder)
        }  # fmt: skip
        return {n: m for n, m in sys.modules.items() if n in theirs or _top(n) in hidden}

    def _has_another(self, name: str, module: ModuleType, finder: Beside) -> bool:
        found = finder.find_spec(name)
        place = Path(found.origin) if found is not None and found.origin else self.folder / name
        is_there = found is not None or place.is_dir()  # a package may lack its `__init__.py`
        return is_there and Path(location(module)).resolve() != place.resolve()


class Surroundings:
    """What every import needs, and code that is loaded may take away."""

    def __init__(self) -> None:
        self._lists = [(owner, name, list(getattr(owner, name))) for owner, name in (
            (sys, "path"), (sys, "meta_path"), (sys, "path_hooks"))]  # fmt: skip
        self._modules = dict(sys.modules)
        self._words = [(owner, dict(vars(owner))) for owner in (builtins, time)]

    def put_back(self) -> None:
        """Put back what was there and is no more; what was added stays."""
        for owner, name, before in self._lists:
            now = getattr(owner, name)
            if missing := [entry for entry in before if entry not in now]:
                now += missing
        if any(sys.modules.get(name) is not module for name, module in self._modules.items()):
            sys.modules.update(self._modules)
        for owner, words in self._words:
            for name in [n for n, word in words.items() if getattr(owner, n, None) is not word]:
                setattr(owner, name, words[name])


def _import_as(name: str, file: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be loaded as Python; give a .py file")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise


def _top(name: str) -> str:
    return name.partition(".")[0]


_HOMES: dict[Path, Home] = {}


def home_at(folder: Path) -> Home:
    """Return the home of a folder."""
    return _HOMES.setdefault(folder, Home(folder))


def is_home(folder: Path) -> bool:
    """Whether something was loaded from a folder."""
    return folder in _HOMES


def is_at_home(module: ModuleType) -> bool:
    """Whether a module was imported for the targets of some folder."""
    return any(known is module for home in _HOMES.values() for known in home.modules.values())
