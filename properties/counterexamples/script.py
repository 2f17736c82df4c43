"""The standalone script of a counterexample: imports torch and the user's code alone, runs, and decides."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tokenize
from typing import Any

from veriformer.properties.bench import redraw
from veriformer.properties.bench.guards import SubjectError, SubjectTimeoutError, guarded
from veriformer.properties.bench.pool import WEIGHT_SEED
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.counterexamples.origin import where_from
from veriformer.properties.counterexamples.program import MADE, MODULE, Judged, Program, UnwritableError, words_in
from veriformer.properties.counterexamples.source import Sources, is_installed
from veriformer.properties.engine import embedding_leaf
from veriformer.properties.engine.property import Property
from veriformer.properties.results.records import Counterexample
from veriformer.properties.subject import layouts

_BUILDING = f'''def {MADE}(config, dtype, redrawn=True, device="cpu", seed={WEIGHT_SEED}):
    """Build the model of these sizes with weights that are the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(config)
        if isinstance(model, torch.nn.Module):
            model = model.to(device).to(dtype).eval()
            if redrawn:
                redraw_weights(model, {WEIGHT_SEED})
    return model'''

_APART = '''def apart(got, expected, unit):
    """Return the largest difference in units; equal infinities agree, and NaN agrees with nothing."""
    got, expected = got.detach().cpu(), expected.detach().cpu()
    wide = torch.complex128 if got.is_complex() else torch.float64
    unit = unit.detach().cpu() if isinstance(unit, torch.Tensor) else unit
    error = (got.to(wide) - expected.to(wide)).abs() / unit
    return float(torch.where(got == expected, 0.0, error.nan_to_num(nan=torch.inf)).max())'''

_VERDICTS = {
    "close": "error = apart(got, expected, {unit})\nviolated = error > {limit!r}",
    "exact": "error = apart(got, expected, 1.0)\nviolated = error > 0",
    "differs": "error = apart(got, expected, {unit})\nviolated = error <= {limit!r}",
    "finite": "error = int((~got.isfinite()).sum())\nviolated = error > 0",
    "require": "violated = not bool(got)",
    "equal": "violated = got != expected",
}
_COUNTED = re.compile(r"[a-z]+\d+")
_STANDARD = ("copy", "types", "sys", "importlib.util")


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
    for every_call in (False, True):
        try:
            parts = _Parts(bench, program, every_call=every_call)
        except UnwritableError:
            return ""
        text = parts.whole(prop, found)
        if parts.shows_it(text):
            return text
    return text if _ends_in_violation(text, {}, bench) else ""


class _Parts:
    """A script in parts: functions, what the subject is, and the program itself."""

    def __init__(self, bench: Workbench, program: Program, *, every_call: bool) -> None:
        lines = program.needed(every_call=every_call)
        if lines is None or program.judged is None:
            raise UnwritableError("a judgement that does not rest on what the subject gave")
        self.bench = bench
        body = "\n".join([*(line.text for line in lines), _verdict(program.judged)])
        self.body = _renumbered(body, {name for line in lines for name in line.makes})
        words = words_in(self.body)
        self.used = [p for p in program.parts if p in words]
        self.used += ["build"] * (MADE in words) + [MODULE] * (MODULE in words)
        pasted = [function for name, function in program.pasted.items() if name in words]
        pasted += [embedding_leaf.at_embedding] * ("at_embedding" in words)
        pasted += [layouts.laid_out] * ("laid_out" in words)
        pasted += [redraw.redraw_weights] * (MADE in words)
        self.sources = Sources()
        for function in pasted:
            self.sources.expression(function)
        self.functions = list(self.sources.chunks)
        self.origin = where_from(bench.subject, self.used, self.sources)
        self.shared = [_BUILDING] * (MADE in words) + [_APART] * ("apart" in words)

    def shows_it(self, text: str) -> bool:
        """Whether the program finds the subject violated: the one at hand, where the user's code is imported."""
        if "user" not in words_in(self.origin):
            return _ends_in_violation(text, {}, self.bench)
        at_hand = {name: getattr(self.bench.subject, name) for name in self.used}
        return _ends_in_violation(self._assembled([], [*self.functions, *self.shared, self.body]), at_hand, self.bench)

    def whole(self, prop: Property, found: Counterexample) -> str:
        """Return the script."""
        head = (
            f"{prop.statement} Not so here: {found.headline}.\n\nProperty {prop.id}: {prop.formula}\n"
            f"Source: {prop.source}\nExpected {found.expected or 'see above'}; got {found.got or 'see above'}.\n"
        )
        claim = f"print({'Claim: ' + found.headline!r})"
        chunks = [*self.sources.chunks, self.origin, *self.shared, f"{claim}\n{self.body}"]
        return self._assembled([_docstring(head)], chunks)

    def _assembled(self, head: list[str], chunks: list[str]) -> str:
        text = "\n\n\n".join(chunks)
        lines = {f"import {name}" for name in _STANDARD if re.search(rf"\b{re.escape(name)}\b", text)}
        lines |= {"from pathlib import Path"} if re.search(r"\bPath\(", text) else set()
        lines |= self.sources.imports | {"import torch"}
        ours = sorted(lines, key=lambda line: ("torch" in line.split()[1], not line.startswith("import"), line))
        return "\n\n".join([*head, "from __future__ import annotations", "\n".join(ours), text]) + "\n"


class _EndError(Exception):
    """A script ended by itself."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def _ends_in_violation(text: str, given: dict[str, Any], bench: Workbench) -> bool:
    """Run a script here, with what stands there already, and tell whether it decides that the property is violated."""
    path, finders, modules = sys.path[:], sys.meta_path[:], dict(sys.modules)
    try:
        guarded(_run, (text, given), {}, 2 * bench.settings.call_seconds)
    except SubjectError as problem:
        return isinstance(problem.__cause__, _EndError) and problem.__cause__.status == 1
    except SubjectTimeoutError:
        return False
    finally:
        sys.path[:], sys.meta_path[:] = path, finders
        for name in [n for n, module in sys.modules.items() if n not in modules and not is_installed(module)]:
            del sys.modules[name]  # the user's file, as the script has imported it
        sys.modules.update(modules)
    return False


def _run(text: str, given: dict[str, Any]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            exec(compile(text, "<script>", "exec"), {"__name__": "__main__", **given})
        except SystemExit as end:
            raise _EndError(int(end.code or 0)) from end


def _verdict(judged: Judged) -> str:
    lines = [f"got = {judged.got}"]
    if judged.expected:
        lines.append(f"expected = {judged.expected}")
    lines.append(_VERDICTS[judged.kind].format(unit=judged.unit, limit=judged.limit))
    error = "'error:', error, " if "error =" in lines[-1] else ""
    lines += [f"print({error}'-> violated' if violated else '-> holds')", "raise SystemExit(violated)"]
    return "\n".join(lines)


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


def _docstring(text: str) -> str:
    return '"""' + text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"') + '"""'
