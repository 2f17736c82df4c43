"""How each property judges, read from the source of its check: exactly, up to measured rounding, or within a bound.

Reading the source needs no torch and cannot differ from what is run. A check is followed into the functions of the
families that it calls.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

JUDGEMENTS = ("close", "exact", "differs", "finite", "require", "equal")
_FAMILIES = "veriformer.properties.families."
_BOUNDS = ("bound", "tolerance", "rounding", "limit")


@dataclass(frozen=True)
class Bound:
    """A derived bound on what rounding may do: the function that gives it.

    Attributes:
        name: of the function.
        module: that holds it, as it is imported.
        derivation: first paragraph of its docstring, or "".
    """

    name: str
    module: str
    derivation: str


@dataclass
class Judging:
    """How one property judges.

    Attributes:
        check: name of the function.
        module: that holds it.
        uses: which of `JUDGEMENTS` it calls, "measured" or "derived" in the place of "close".
        bounds: functions that give its bounds.
        expressions: bounds as they are written in the check.
    """

    check: str
    module: str
    uses: set[str] = field(default_factory=set)
    bounds: dict[str, Bound] = field(default_factory=dict)
    expressions: list[str] = field(default_factory=list)


def judgings(source: Path) -> dict[str, Judging]:
    """Return how every property judges, by id.

    Args:
        source: the folder of the package `veriformer`.
    """
    sources = _Sources(source)
    found = {}
    for file in sorted((source / "properties" / "families").glob("*.py")):
        module = _FAMILIES + file.stem
        for name, function in sources.functions(module).items():
            if (prop := _property_of(function)) is not None:
                judging = Judging(name, module)
                _follow(sources, module, name, judging, set())
                found[prop] = judging
    return found


class _Sources:
    """Syntax trees of modules, read once each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._trees: dict[str, ast.Module] = {}

    def tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            file = self.folder / Path(*module.split(".")[1:]).with_suffix(".py")
            text = file.read_text(encoding="utf-8") if file.is_file() else ""
            self._trees[module] = ast.parse(text)
        return self._trees[module]

    def functions(self, module: str) -> dict[str, ast.FunctionDef]:
        return {n.name: n for n in self.tree(module).body if isinstance(n, ast.FunctionDef)}

    def home(self, module: str, name: str) -> str | None:
        """Return the module of the package in which a name of a module is defined, or None."""
        if name in self.functions(module):
            return module
        for node in self.tree(module).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("veriformer."):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return node.module
        return None


def _property_of(function: ast.FunctionDef) -> str | None:
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "holds" and mark.args:
            return str(ast.literal_eval(mark.args[0]))
    return None


def _follow(sources: _Sources, module: str, name: str, judging: Judging, seen: set[tuple[str, str]]) -> None:
    """Add how a function judges, and what it calls in the families."""
    function = sources.functions(module).get(name)
    if function is None or (module, name) in seen:
        return
    seen.add((module, name))
    for call in (n for n in ast.walk(function) if isinstance(n, ast.Call)):
        judgement = _judgement(call.func)
        if not judgement:
            continue
        bound = next((k.value for k in call.keywords if k.arg == "bound"), None)
        is_derived = bound is not None and not (isinstance(bound, ast.Constant) and bound.value is None)
        if bound is not None and is_derived and (told := _told(bound, function)) not in judging.expressions:
            judging.expressions.append(told)
        judging.uses.add(judgement if judgement != "close" else "derived" if is_derived else "measured")
    for given in _bounds_in(sources, module, function):
        judging.bounds.setdefault(given.name, given)
    for used in {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}:
        home = sources.home(module, used)
        if home is not None and home.startswith(_FAMILIES):
            _follow(sources, home, used, judging, seen)


def _judgement(called: ast.expr) -> str:
    """Return which of `JUDGEMENTS` of a case is called; "" for anything else."""
    if not isinstance(called, ast.Attribute) or called.attr not in JUDGEMENTS:
        return ""
    return called.attr if isinstance(called.value, ast.Name) and called.value.id == "case" else ""


def _bounds_in(sources: _Sources, module: str, function: ast.FunctionDef) -> Iterator[Bound]:
    """Give the functions of the package that a function uses and whose names say that they bound an error."""
    for name in sorted({n.id for n in ast.walk(function) if isinstance(n, ast.Name)}):
        home = sources.home(module, name)
        if home is None or not any(word in name for word in _BOUNDS):
            continue
        defined = sources.functions(home).get(name)
        if defined is not None:
            told = (ast.get_docstring(defined) or "").split("\n\nArgs:")[0].split("\n\nReturns:")[0]
            yield Bound(name, home, " ".join(told.split()))


def _told(bound: ast.expr, function: ast.FunctionDef) -> str:
    """Return a bound as the check writes it; where it is a name, what the name was given."""
    if isinstance(bound, ast.Name):
        for node in ast.walk(function):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(t, ast.Name) and t.id == bound.id for t in targets) and isinstance(node, ast.Assign):
                return ast.unparse(node.value)
    return ast.unparse(bound)
