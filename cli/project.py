"""`[tool.veriformer]` of a pyproject.toml: what a project wants of every run, by the names of options of `check`.

    [tool.veriformer]
    subjects = ["mygpt.py:mine"]   # the TARGETs of a run that names none
    profile = "quick"
    deviations = "deviations.toml"
    pytest = true                  # `pytest` judges the subjects too, without --veriformer
    plugins = ["my_properties"]    # modules of your own with properties, adapters, faults, studies

Paths start from the folder of the file. pytest looks at the file whenever it starts: nothing heavy is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from veriformer.properties.adapters.plugins import Plugin
from veriformer.reports.records import read_text

NAME, TABLE = "pyproject.toml", "[tool.veriformer]"
SUBJECTS, PYTEST, PLUGINS = "subjects", "pytest", "plugins"
OPTIONS = ("profile", "seed", "level", "dtype", "device", "deviations", "kind", "declare", "only", "exclude",
           "call-seconds", "max-memory", "allow-open")  # fmt: skip
"""Options of `check` that a project may set once for all runs; the others are of one run."""

_TYPES: dict[str, tuple[type, ...]] = {"integer range": (int,), "number": (int, float), "boolean": (bool,)}
_WORDS: dict[tuple[type, ...], str] = {
    (int,): "a whole number",
    (int, float): "a number",
    (bool,): "true or false",
    (str,): "a string",
}


class ProjectError(ValueError):
    """A pyproject.toml that cannot be relied on; says what to mend in one sentence."""


@dataclass(frozen=True)
class Project:
    """What the nearest pyproject.toml says.

    Attributes:
        path: of the file; None where there is none, or nothing is said of veriformer there.
        table: as it was read.
    """

    path: Path | None = None
    table: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The file, as one names it from the current folder."""
        return os.path.relpath(self.path) if self.path else NAME

    @property
    def wants_pytest(self) -> bool:
        """Whether pytest is to judge the subjects without being told on its command line."""
        return self.table.get(PYTEST, False) is not False

    def plugins(self) -> list[Plugin]:
        """Return the plug-ins that the table names, found from the folder of the file.

        Raises:
            ProjectError: one is not the dotted name of a module.
        """
        found = []
        for word in self._several(PLUGINS, self.table.get(PLUGINS, [])):
            if not all(part.isidentifier() for part in word.split(".")):
                raise self._wrong(f"{PLUGINS}: {word!r} is no module; write its dotted name, as after `import`")
            assert self.path is not None
            found.append(Plugin(word, word, self.name, str(self.path.parent)))
        return found

    def defaults(self, params: Iterable[Any]) -> dict[str, Any]:
        """Return the values that the table gives to parameters of a command, by their names.

        Args:
            params: of the command, as click has them.

        Raises:
            ProjectError: a key is misspelt, or a value is of another type or none of those that the option takes.
        """
        known = {key: p for p in params for key in OPTIONS if f"--{key}" in p.opts}
        keys = (SUBJECTS, PYTEST, PLUGINS, *known)
        found = {}
        for key, value in self.table.items():
            if key not in keys:
                import difflib

                close = difflib.get_close_matches(key, keys, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise self._wrong(f"there is no key {key!r}; {hint}the keys are: {', '.join(keys)}")
            if key == PYTEST:
                self._of_type(key, value, (bool,))
            elif key == PLUGINS:
                self.plugins()
            elif key == SUBJECTS:
                found["targets"] = [self._from_here(word) for word in self._several(key, value)]
            else:
                found[known[key].name] = self._value(key, value, known[key])
        return found

    def _value(self, key: str, value: Any, param: Any) -> Any:
        if param.multiple:
            values = self._several(key, value)
            return [self._taken(key, one, param) for one in values]
        self._of_type(key, value, _TYPES.get(param.type.name, (str,)))
        if param.type.name == "path":
            assert self.path is not None
            value = os.path.relpath(self.path.parent / value)
        return self._taken(key, value, param)

    def _taken(self, key: str, value: Any, param: Any) -> Any:
        from click import BadParameter

        try:
            taken = param.type.convert(value, param, None)
            if param.callback is not None:  # it says no to words that are none of its
                param.callback(None, param, (taken,) if param.multiple else taken)
        except (BadParameter, OverflowError, ValueError) as problem:
            told = problem.message.rstrip(".") if isinstance(problem, BadParameter) else str(problem)
            raise self._wrong(f"{key}: {told}") from None
        return taken

    def _several(self, key: str, value: Any) -> list[str]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
            raise self._wrong(f"{key} was {value!r}; write a string or a list of strings")
        return values

    def _of_type(self, key: str, value: Any, types: tuple[type, ...]) -> None:
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise self._wrong(f"{key} was {value!r}; write {_WORDS[types]}")

    def _from_here(self, word: str) -> str:
        """Return a target whose file is found from the current folder too."""
        assert self.path is not None
        place, colon, attribute = word.rpartition(":") if not word.endswith(".py") else (word, "", "")
        return f"{os.path.relpath(self.path.parent / place)}{colon}{attribute}" if place.endswith(".py") else word

    def _wrong(self, why: str) -> ProjectError:
        return ProjectError(f"{self.name}, {TABLE}: {why}")


def nearest(folder: Path) -> Project:
    """Return what the pyproject.toml of a folder says, or else that of the nearest folder above that has one.

    Raises:
        ProjectError: it cannot be read, or is no TOML.
    """
    path = next((p / NAME for p in (folder, *folder.parents) if (p / NAME).is_file()), None)
    if path is None:
        return Project()
    import tomllib

    told = Project(path)
    try:
        text = read_text(path)
        tool = tomllib.loads(text).get("tool", {}) if "veriformer" in text else {}
    except OSError as problem:
        raise ProjectError(f"{told.name} cannot be read: {problem.strerror}; mend it or go to another folder") from None
    except RecursionError:
        raise ProjectError(f"{told.name} nests its data too deeply to be read") from None
    except ValueError as problem:  # no TOML, no UTF-8, or a number of thousands of digits
        raise ProjectError(f"{told.name} is no TOML: {problem}") from None
    table = tool.get("veriformer") if isinstance(tool, dict) else None
    if table is None:
        return Project()
    if not isinstance(table, dict):
        raise ProjectError(f"{told.name}: tool.veriformer was {table!r}; write a table {TABLE}")
    return Project(path, table)
