"""The standalone script of a counterexample: imports torch and the user's code alone, and runs."""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from veriformer.properties.bench import redraw
from veriformer.properties.bench.pool import WEIGHT_SEED, Built
from veriformer.properties.counterexamples.transcript import Judged, Transcript, needed, outputs_of
from veriformer.properties.engine import embedding_leaf
from veriformer.properties.engine.property import Property
from veriformer.properties.results.records import Counterexample
from veriformer.properties.subject import layouts
from veriformer.properties.subject.subject import Subject

_STAND_IN = """
try:
    import veriformer.properties  # the user's file may declare a Subject
except ImportError:  # not installed: a plain record takes its place, nothing else of it is used here
    record = types.ModuleType("veriformer.properties")
    record.Subject = lambda **given: types.SimpleNamespace(**{name: None for name in PARTS} | given)
    record.DrawnConfig = types.SimpleNamespace
    record.check = record.parametrize = lambda *args, **kwargs: None
    sys.modules["veriformer"] = types.ModuleType("veriformer")
    sys.modules["veriformer"].properties = sys.modules["veriformer.properties"] = record
"""

_APART = "apart = (got - expected).detach().double().abs().nan_to_num(float('inf'))\n"
_JUDGEMENT = {
    "close": _APART + "error = float((apart / {unit}).max())\nfails = error > {limit!r}",
    "exact": _APART + "error = float(apart.max())\nfails = error > 0",
    "differs": _APART + "error = float((apart / {unit}).max())\nfails = not error > {limit!r}",
    "finite": "error = int((~got.isfinite()).sum())\nfails = error > 0",
}


def script(prop: Property, subject: Subject, found: Counterexample, transcript: Transcript) -> str:
    """Return the source of a script that shows the violation again without the check that found it.

    Args:
        prop: the property that does not hold.
        subject: what was judged.
        found: the smallest case.
        transcript: of that case.

    Returns:
        Source; it exits with status 1 while the violation is there, 0 once it is gone. Where the subject cannot be
        reached from outside (made in an interactive session), a comment says what to fill in.
    """
    lines = needed(transcript)
    text = "\n".join(line.text for line in lines)
    used = [p for p in transcript.parts if f"{p}(" in text]
    parts = [
        f'"""{prop.statement} Not so here: {found.headline}.\n\n'
        f"Property {prop.id}: {prop.formula}\nSource: {prop.source}\n"
        f'Expected {found.expected or "see above"}; got {found.got or "see above"}.\n"""',
        "import importlib, importlib.util, sys, types\n"
        "from collections.abc import Callable\nfrom pathlib import Path\n\n"
        "import torch\nfrom torch import Tensor, nn",
        _where_from(subject, used),
    ]
    if "at_embedding(" in text:
        parts.append(_source(embedding_leaf.at_embedding))
    if "laid_out(" in text:
        parts.append(_source(layouts.laid_out))
    built = {name: b for name, b in transcript.models.items() if name in text}
    if any(b.is_fresh for b in built.values()):
        parts.append(_source(redraw.redraw_weights))
    parts += [_model(name, b) for name, b in built.items()]
    parts.append(text)
    parts.append(_verdict(transcript.judged, outputs_of(transcript), found))
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def _source(function: Callable[..., Any]) -> str:
    return textwrap.dedent(inspect.getsource(function))


def _model(name: str, built: Built) -> str:
    lines = []
    if built.is_fresh:
        sizes = ", ".join(f"{k}={v!r}" for k, v in asdict(built.config).items())
        lines += [
            f"config = types.SimpleNamespace({sizes}, d_head={built.config.d_head})",
            f"torch.manual_seed({WEIGHT_SEED})",
            f"{name} = build(config)",
            f"if isinstance({name}, torch.nn.Module):",
            f"    {name} = {name}.to({built.dtype}).eval()",
            f"    redraw_weights({name}, {WEIGHT_SEED})",
        ]
    else:
        lines += [f"{name} = module", f"if isinstance({name}, torch.nn.Module):", f"    {name} = {name}.eval()"]
    return "\n".join(lines)


def _verdict(judged: Judged | None, outputs: list[str], found: Counterexample) -> str:
    head = f"print({('Claim: ' + found.headline)!r})"
    if judged is None or judged.kind not in _JUDGEMENT:
        shown = [f"print({name!r}, {name})" for name in outputs[-2:]]
        said = f"print({f'expected: {found.expected}; got: {found.got}'!r})"
        return "\n".join([head, *shown, said, "raise SystemExit(1)"])
    test = _JUDGEMENT[judged.kind].format(unit=judged.unit, limit=judged.limit)
    lines = [f"got = {judged.got}"]
    if judged.expected:
        lines.append(f"expected = {judged.expected}")
    lines += [test, head, "print('error:', error, '-> violated' if fails else '-> holds')", "raise SystemExit(fails)"]
    return "\n".join(lines)


def _where_from(subject: Subject, used: list[str]) -> str:
    """Return source that defines build (or module), and the callables of the subject that the script uses."""
    place = _importable(subject)
    names = [p for p in used if p != "at_embedding"]
    if place is not None:
        lines = [_STAND_IN.replace("PARTS", repr(_PARTS)), place]
        lines += [f"{name} = subject.{name}" for name in ("build", "module", "backends", *names)]
        return "\n".join(lines)
    chunks: dict[str, str] = {}
    wanted = {name: getattr(subject, name) for name in (*names, "build") if getattr(subject, name) is not None}
    bound = []
    for name, function in wanted.items():
        core = function.func if isinstance(function, functools.partial) else function
        if not inspect.isfunction(core) or core.__closure__ or core.__name__ == "<lambda>":
            return f"# fill in: {', '.join(wanted)} of the subject {subject.name!r}, which cannot be imported from here"
        _collect(core, chunks)
        given = f", {', '.join(f'{k}={v!r}' for k, v in function.keywords.items())}" if isinstance(
            function, functools.partial) and function.keywords else ""  # fmt: skip
        args = "".join(f", {a!r}" for a in function.args) if isinstance(function, functools.partial) else ""
        bound.append(f"{name} = functools.partial({core.__name__}{args}{given})" if args or given
                     else f"{name} = {core.__name__}")  # fmt: skip
    return "\n\n".join(["import functools", *chunks.values(), "\n".join(bound)])


_PARTS = tuple(field.name for field in fields(Subject))


def _collect(function: Any, chunks: dict[str, str]) -> None:
    """Gather the source of a function and of what it uses from its own module; what else it uses is imported."""
    name = function.__name__
    if name in chunks:
        return
    chunks[name] = ""
    module = sys.modules.get(function.__module__)
    for used in sorted(_global_names(function)):
        value = getattr(module, used, None)
        if isinstance(value, types.ModuleType):
            chunks.setdefault(used, f"import {value.__name__} as {used}")
        elif inspect.isfunction(value) or inspect.isclass(value):
            if value.__module__ == function.__module__:
                _collect(value, chunks)
            else:
                chunks.setdefault(used, f"from {value.__module__} import {value.__name__} as {used}")
        elif value is not None:
            chunks.setdefault(used, f"{used} = {value!r}")
    source = chunks.pop(name)
    chunks[name] = source or "from __future__ import annotations"[:0] + textwrap.dedent(inspect.getsource(function))


def _global_names(function: Any) -> set[str]:
    codes = [function.__code__] if inspect.isfunction(function) else [
        m.__code__ for m in vars(function).values() if inspect.isfunction(m)
    ]  # fmt: skip
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    scope = vars(sys.modules[function.__module__])
    annotations = inspect.get_annotations(function) if inspect.isfunction(function) else {}
    words = {w.strip() for a in annotations.values() for w in str(a).replace("|", ",").replace("[", ",").split(",")}
    return {n for n in names | words if n in scope and not n.startswith("__")} - {function.__name__}


def _importable(subject: Subject) -> str | None:
    """Return source that imports the subject from the user's own module or file, or None if it stands in none."""
    module_name, attribute = _location(subject)
    if not module_name or module_name.startswith("veriformer."):
        return None
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    call = "()" if callable(getattr(module, attribute, None)) else ""
    if file and (module_name == "__main__" or "." not in module_name):
        return (
            f"path = Path({str(Path(file))!r})\nsys.path.insert(0, str(path.parent))\n"
            f"spec = importlib.util.spec_from_file_location({Path(file).stem!r}, path)\n"
            f"user = importlib.util.module_from_spec(spec)\nsys.modules[{Path(file).stem!r}] = user\n"
            f"spec.loader.exec_module(user)\nsubject = user.{attribute}{call}"
        )
    return f"subject = importlib.import_module({module_name!r}).{attribute}{call}"


def _location(subject: Subject) -> tuple[str, str]:
    for function in (subject.build, subject.forward, type(subject.module)):
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        for name, value in list(vars(module).items()) if module else ():
            same = isinstance(value, Subject) and value.kind == subject.kind and (
                value.build is subject.build and value.module is subject.module and value.forward is subject.forward
            )  # fmt: skip
            if same and module is not None:
                return module.__name__, name
    return "", ""
