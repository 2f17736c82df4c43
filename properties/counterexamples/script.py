"""The standalone script of a counterexample: imports torch and the user's code alone, runs, and decides."""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterable
from typing import Any

import torch

from veriformer.properties.bench import redraw
from veriformer.properties.bench.guards import SubjectError, SubjectTimeoutError, guarded
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.counterexamples.origin import where_from
from veriformer.properties.counterexamples.program import MADE, MODULE, Judged, Program, UnwritableError, words_in
from veriformer.properties.counterexamples.shortening import (
    WIDTH,
    inlined,
    merged,
    paragraphs,
    wrapped,
)
from veriformer.properties.counterexamples.source import (
    Sources,
    is_installed,
    making_of,
    names_made,
    names_used,
    redrawing_of,
)
from veriformer.properties.engine import embedding_leaf
from veriformer.properties.engine.property import Property
from veriformer.properties.results.records import Counterexample
from veriformer.properties.subject import layouts

_ERROR = """apart = (got.to(torch.complex128) - expected.to(torch.complex128)).abs() / {unit}
error = float(torch.where(got == expected, 0.0, apart.detach().nan_to_num(nan=torch.inf)).max())
"""

_VERDICTS = {
    "close": _ERROR + "violated = error > {limit!r}",
    "exact": _ERROR + "violated = error > 0",
    "differs": _ERROR + "violated = error <= {limit!r}",
    "finite": "error = int((~got.isfinite()).sum())\nviolated = error > 0",
    "require": "violated = not bool(got)",
    "equal": "violated = got != expected",
}
_BOUNDED = ("close", "exact")
"""Judgements of a difference that is too large: what is right stays below the same limit with any weights."""

_COUNTED = re.compile(r"[a-z]+\d+")
_SIDES = re.compile(r"^got = (.*)\nexpected = (.*)$", re.M)
_STANDARD = ("copy.", "functools.", "os.", "types.", "sys.", "importlib.util.")
_IN_ONE_LINE = ("copy", "functools", "itertools", "math", "os", "sys", "types")
_NOT_RUN = """
sys.excepthook = lambda kind, problem, trace: (  # Python's own status would pass for a violation
    print(f"cannot run, so nothing is shown: {kind.__name__}: {problem}", file=sys.stderr), os._exit(2))
"""
COPIED = "# What the case above uses, copied: this file needs torch and the code that is judged, and no more."
"""Above it a script is read, below it nothing needs to be."""


def script(prop: Property, bench: Workbench, found: Counterexample, program: Program) -> str:
    """Return the source of a script that shows the violation again without the check that found it.

    It was run, on this subject, before it is handed out: the shortest program that shows the violation, or the one
    with all calls if the subject carries something on from one to the next, at the last on the subject fetched anew.

    Args:
        prop: the property that does not hold.
        bench: with what was judged.
        found: the smallest case.
        program: that was recorded of it.

    Returns:
        Source; it exits with status 1 while the violation is there, 0 once it is gone. Empty if no such script can be
        written: what is judged is not told by torch and the subject alone.
    """
    text = ""
    plain = [(False, False)] if program.judged is not None and program.judged.kind in _BOUNDED else []
    for every_call, redrawn in (*plain, (False, True), (True, True)):
        try:
            parts = _Parts(bench, program, every_call=every_call, redrawn=redrawn)
        except UnwritableError:
            return ""
        if not redrawn and MADE not in words_in(parts.body):
            continue
        text = parts.whole(prop, found)
        if parts.shows_it(text):
            return text
    return text if _ends_in_violation(text, {}, bench) else ""


class _Parts:
    """A script in parts: what is told, where the subject is, the case, and below it what the case uses."""

    def __init__(self, bench: Workbench, program: Program, *, every_call: bool, redrawn: bool) -> None:
        lines = program.needed(every_call=every_call)
        if lines is None or program.judged is None:
            raise UnwritableError("a judgement that does not rest on what the subject gave")
        self.bench = bench
        body = "\n".join(merged(inlined(lines, _verdict(program.judged, bench.device))))
        self.body = _in_one(_renumbered(body, {name for line in lines for name in line.makes}))
        redrawn = redrawn and self.body.count(f"{MADE}(") > self.body.count(", redrawn=False)")
        self.redrawn = redrawn
        if not redrawn:
            self.body = self.body.replace(", redrawn=False", "")
        words = words_in(self.body)
        self.used = [p for p in program.parts if p in words]
        self.used += ["build"] * (MADE in words) + [MODULE] * (MODULE in words)
        pasted = [function for name, function in program.pasted.items() if name in words]
        pasted += [embedding_leaf.at_embedding] * ("at_embedding" in words)
        pasted += [layouts.laid_out] * ("laid_out" in words)
        redrawing = redrawing_of(program.models) if MADE in words and redrawn else ""
        pasted += [redraw.redraw_weights] * (MADE in words and redrawn and not redrawing)
        self.sources = Sources()
        for function in pasted:
            self.sources.expression(function)
        self.functions = list(self.sources.chunks)
        self.origin = where_from(bench.subject, self.used, self.sources)
        self.shared = [redrawing] if redrawing else []
        if MADE in words:
            self.shared.append(making_of(self.body, program.models, redrawn=redrawn, in_short=bool(redrawing)))

    def shows_it(self, text: str) -> bool:
        """Whether the program finds the subject violated: the one at hand, where the user's code is imported."""
        if "user" not in words_in(self.origin):
            return _ends_in_violation(text, {}, self.bench)
        at_hand = {name: getattr(self.bench.subject, name) for name in self.used}
        return _ends_in_violation(self._assembled([], [*self.functions, *self.shared, self.body]), at_hand, self.bench)

    def whole(self, prop: Property, found: Counterexample) -> str:
        """Return the script."""
        drawn = "" if self.redrawn or MADE not in words_in(self.body) else " (there with larger weights than here)"
        error = "" if math.isnan(found.error) else f"; error {found.error:.3g}, tolerance {found.tolerance:.3g}"
        numbers = f"The check{drawn}: expected {found.expected}, got {found.got}{error}." if found.got else ""
        told = paragraphs(
            f"{prop.statement} Not so here: {found.headline}.",
            " ".join([numbers, f"Likely cause: {found.cause}." if found.cause else ""]).strip(),
            f"{prop.id}: {prop.formula} ({prop.source.rstrip('.')}). Exits with status 1 while it does not hold, "
            "0 once it does, 2 where it cannot run.",
        )
        inner = textwrap.indent(wrapped(self.body, WIDTH - 4), "    ")
        last = f"print({prop.id!r}, "
        case = (
            f"def case():\n{inner}".replace("print(", last, 1)
            if inner.count("print(") == 1
            else f"def case():\n{inner}"
        )
        own = self.sources.chunks[len(self.functions) :]
        below = [*self.functions, *self.shared]
        if names_made(self.functions) & names_used("\n".join([*own, self.origin])):  # what is needed at once
            chunks = [*self.sources.chunks, self.origin, case, *self.shared]
        else:
            chunks = [*own, self.origin, case, *([f"{COPIED}\n{below[0]}", *below[1:]] if below else [])]
        return self._assembled([told], [*chunks, "case()"])

    def _assembled(self, head: list[str], chunks: list[str]) -> str:
        text = "\n\n".join(chunks)
        lines = {f"import {name[:-1]}" for name in _STANDARD if re.search(rf"\b{re.escape(name)}", text)}
        lines |= {"from pathlib import Path"} if re.search(r"\bPath\(", text) else set()
        lines |= {"from unittest import mock"} if "mock.Magic" in text else set()
        lines |= {"import os", "import sys"} if head else set()
        lines |= self.sources.imports | {"import torch"}
        ours = sorted(
            _joined(lines), key=lambda line: (line.split()[1].startswith("torch"), not line.startswith("import"), line)
        )
        future = ["from __future__ import annotations"] * any("@dataclass" in chunk for chunk in self.sources.chunks)
        imports = "\n".join(ours) + _NOT_RUN * bool(head)  # and where the subject is from, right below
        gap = "\n" * (1 if head else 2) * (not head or chunks[0] != self.origin)
        return "\n\n".join([*head, *future, f"{imports}{gap}{text}"]) + "\n"


def _joined(lines: Iterable[str]) -> list[str]:
    """Return lines of imports, those from one module in one line."""
    lines = {*lines}
    standard = sorted(line.removeprefix("import ") for line in lines if line[7:] in _IN_ONE_LINE)
    standard += ["torch"] * bool(standard)  # which every script imports
    lines -= {f"import {name}" for name in standard}
    whole = [line for line in lines if not line.startswith("from ") or " as " in line]
    whole += [f"import {', '.join(standard)}"] * bool(standard)
    found: dict[str, list[str]] = {}
    for line in sorted({*lines} - {*whole}):
        module, _, name = line.removeprefix("from ").partition(" import ")
        found.setdefault(module, []).append(name)
    return [*whole, *(f"from {module} import {', '.join(names)}" for module, names in found.items())]


class _EndError(Exception):
    """A script ended by itself."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def _ends_in_violation(text: str, given: dict[str, Any], bench: Workbench) -> bool:
    """Run a script here, with what stands there already, and tell whether it decides that the property is violated."""
    path, finders, modules, hook = sys.path[:], sys.meta_path[:], dict(sys.modules), sys.excepthook
    try:
        guarded(_run, (text, given), {}, 2 * bench.settings.call_seconds)
    except SubjectError as problem:
        return isinstance(problem.__cause__, _EndError) and problem.__cause__.status == 1
    except SubjectTimeoutError:
        return False
    finally:
        sys.path[:], sys.meta_path[:], sys.excepthook = path, finders, hook
        for name in [n for n, module in sys.modules.items() if n not in modules and not is_installed(module)]:
            del sys.modules[name]  # the user's file, as the script has imported it
        sys.modules.update(modules)
    return False


def _run(text: str, given: dict[str, Any]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            exec(compile(text, "<script>", "exec"), {"__name__": "__main__", "__file__": "script.py", **given})
        except SystemExit as end:
            raise _EndError(int(end.code or 0)) from end


def _verdict(judged: Judged, device: torch.device) -> list[str]:
    sides = {"got": judged.got, "expected": judged.expected, "unit": judged.unit}
    if device.type != "cpu" and judged.kind in (*_BOUNDED, "differs"):  # what is compared may lie apart
        sides = {name: f"torch.as_tensor({text}).cpu()" for name, text in sides.items()}
    lines = [f"{name} = {text}" for name, text in sides.items() if text and name != "unit"]
    lines += _VERDICTS[judged.kind].format(unit=sides["unit"], limit=judged.limit).split("\n")
    error = "'error:', error, " if any(line.startswith("error =") for line in lines) else ""
    return [*lines, f"print({error}'-> violated' if violated else '-> holds')", "raise SystemExit(violated)"]


def _in_one(source: str) -> str:
    """Say what is compared in one line where it fits in one."""
    found = _SIDES.search(source)
    told = found and f"got, expected = {found[1]}, {found[2]}"
    return source if not found or not told or len(told) > WIDTH - 4 else source.replace(found[0], told)


def _renumbered(source: str, names: set[str]) -> str:
    """Count the variables anew, in the order in which they appear: most of a recording is left out."""
    counts: dict[str, str] = {}
    lines = source.split("\n")
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.NAME]
    found = [t for t in tokens if t.string in names and _COUNTED.fullmatch(t.string)]
    for token in found:
        counts.setdefault(token.string, f"{token.string.rstrip('0123456789')}{len(counts) + 1}")
    for token in reversed(found):  # from the end, so that places before it stay where they are
        (row, start), (_, end) = token.start, token.end
        lines[row - 1] = lines[row - 1][:start] + counts[token.string] + lines[row - 1][end:]
    return "\n".join(lines)
