"""The subject with one small change of its source: the code of a function, exchanged where it stands."""

from __future__ import annotations
import __future__

import ast
import linecache
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType

from veriformer.properties.diagnosis.rewriting.edits import Edit, Source, edits_of
from veriformer.properties.diagnosis.rewriting.executed import Executed, executed_by


@dataclass(frozen=True)
class Rewriting:
    """One change of one function.

    Attributes:
        file: of the function.
        name: its qualified name.
        functions: the objects that run its code.
        edit: the change.
        first: line of the statement of the file that the function stands in.
        span: of that statement, in bytes of the file.
    """

    file: str
    name: str
    functions: tuple[FunctionType, ...]
    edit: Edit
    first: int
    span: tuple[int, int]

    @contextmanager
    def made(self) -> Iterator[bool]:
        """Make the change for a while; whether it could be made."""
        code = self._compiled()
        before = [f.__code__ for f in self.functions]
        fits = code is not None and all(c.co_freevars == code.co_freevars for c in before)
        try:
            if code is not None and fits:
                for function in self.functions:
                    function.__code__ = code
            yield fits
        finally:
            for function, own in zip(self.functions, before, strict=True):
                function.__code__ = own

    def _compiled(self) -> CodeType | None:
        raw = "".join(linecache.getlines(self.file)).encode()
        start, stop = self.span
        text = raw[start : self.edit.start] + self.edit.new.encode() + raw[self.edit.stop : stop]
        flags = self.functions[0].__code__.co_flags & __future__.annotations.compiler_flag
        try:
            tree = ast.parse(text)
            ast.increment_lineno(tree, self.first - 1)
            return _code_of(compile(tree, self.file, "exec", flags, dont_inherit=True), self.name)
        except (SyntaxError, ValueError):
            return None


def _code_of(code: CodeType, name: str) -> CodeType | None:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_qualname == name:
                return inner
            if found := _code_of(inner, name):
                return found
    return None


def rewritings_of(run: Callable[[], object]) -> list[Rewriting]:
    """Return the changes of what a run goes through, small ones first."""
    found = [r for function in executed_by(run) for r in _of_function(function)]
    return sorted({(r.file, r.edit.start, r.edit.stop, r.edit.new): r for r in found}.values(), key=_rank)


def _rank(rewriting: Rewriting) -> int:
    return rewriting.edit.rank


def _of_function(function: Executed) -> Iterator[Rewriting]:
    text = "".join(linecache.getlines(function.file))
    if not text:
        return
    source, first = Source(text), function.functions[0].__code__.co_firstlineno
    for top in ast.parse(text).body:
        if not top.lineno - 9 <= first <= (top.end_lineno or top.lineno):
            continue
        for node in ast.walk(top):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _begins(node) == first:
                span = (source.starts[_begins(top) - 1], source.span(top)[1])
                for edit in edits_of(source, node, function.lines, function.kinds):
                    yield Rewriting(function.file, function.name, tuple(function.functions), edit, _begins(top), span)
                return


def _begins(node: ast.AST) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])  # type: ignore[attr-defined]
