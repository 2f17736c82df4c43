"""Source that is pasted into a script: functions of this package, or of a session, with everything that they use."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from veriformer.properties.adapters.places import is_of_a_library
from veriformer.properties.bench.pool import WEIGHT_SEED, is_partly_complex
from veriformer.properties.counterexamples.literals import literal
from veriformer.properties.counterexamples.program import MADE, UnwritableError
from veriformer.properties.counterexamples.shortening import lean, untyped

_OURS = "veriformer.properties."


class Sources:
    """Functions and classes as source, each name once, what is used before what uses it.

    Attributes:
        imports: lines.
        chunks: source of functions, classes and constants.
    """

    def __init__(self) -> None:
        self.imports: set[str] = set()
        self.chunks: list[str] = []
        self._taken: dict[str, Any] = {}
        self._known: list[tuple[Any, str]] = []

    def know(self, value: Any, expression: str) -> None:
        """Say how a value is reached, so that its source is not needed."""
        self._known.append((value, expression))

    def claim(self, name: str, value: Any) -> None:
        """Say that a script has a value under a name already."""
        self._taken[name] = value

    def expression(self, value: Any) -> str:
        """Return what a value is called here, a function above all; the source of it is added.

        Raises:
            UnwritableError: it has none of its own, as a lambda and what was made inside of another function.
        """
        for known, expression in self._known:
            if known is value:
                return expression
        if isinstance(value, functools.partial):
            given = [self.expression(value.func), *(self.expression(a) for a in value.args)]
            given += [f"{k}={self.expression(v)}" for k, v in value.keywords.items()]
            self.imports.add("import functools")
            return f"functools.partial({', '.join(given)})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{literal(k)}: {self.expression(v)}' for k, v in value.items())}}}"
        if isinstance(value, list | tuple):
            inner = ", ".join(self.expression(v) for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, set | frozenset):
            return f"{type(value).__name__}([{', '.join(sorted(self.expression(v) for v in value))}])"
        if inspect.isroutine(value) or inspect.isclass(value):
            self._add(value)
            return str(value.__name__)
        return literal(value)

    def _add(self, part: Any, name: str = "") -> None:
        """Add a function or class, under a name of its own or another one."""
        own, module = part.__name__, sys.modules.get(part.__module__)
        name = name or own
        if not self._claims(name, part):
            return
        if "<" in part.__qualname__:
            raise UnwritableError(f"{part.__qualname__} of {part.__module__} was made inside of another function")
        if module is None or vars(module).get(own) is not part:
            raise UnwritableError(f"{part.__module__} has no {own}")
        if is_installed(module):
            self.imports.add(f"from {part.__module__} import {own}" + f" as {name}" * (name != own))
        elif name != own:
            self.chunks.append(f"{name} = {self.expression(part)}")
        else:
            scope = vars(module)
            source = lean(textwrap.dedent(inspect.getsource(scope[own])).rstrip())
            if module.__name__.startswith(_OURS):
                source = untyped(source)
            for used in sorted(set(_names_read(ast.parse(source))) & set(scope)):
                self._use(used, scope[used])
            self.chunks.append(source)

    def _use(self, name: str, value: Any) -> None:
        """Make a name of a module known to what is pasted from there."""
        if inspect.isroutine(value) or inspect.isclass(value):
            self._add(value, name)
        elif self._claims(name, value):
            if isinstance(value, types.ModuleType):
                called = value.__name__
                self.imports.add(f"import {called}" if called == name else f"import {called} as {name}")
            else:
                self.chunks.append(f"{name} = {self.expression(value)}")

    def _claims(self, name: str, value: Any) -> bool:
        """Take a name; whether it was free.

        Raises:
            UnwritableError: another value has it.
        """
        if name in self._taken:
            if self._taken[name] is not value:
                raise UnwritableError(f"two values are called {name!r}")
            return False
        self._taken[name] = value
        return True


def is_installed(module: types.ModuleType) -> bool:
    """Whether a script may import a module: not ours, nor what a person types or runs."""
    if module.__name__.startswith(_OURS) or module.__name__ == "__main__":
        return False
    return "." in module.__name__ or is_of_a_library(module)


def _names_read(tree: ast.AST) -> Iterator[str]:
    """Go through the names that source reads while it runs: not those of its types."""
    types_of_it = (getattr(tree, "annotation", None), getattr(tree, "returns", None))
    for child in ast.iter_child_nodes(tree):
        if child in types_of_it:
            continue
        if isinstance(child, ast.Name):
            yield child.id
        yield from _names_read(child)


def making_of(body: str, models: Sequence[Any], *, redrawn: bool, in_short: bool) -> str:
    """Return the source of the function that builds a model of drawn sizes, as far as a body calls for it.

    Args:
        body: source that calls it.
        models: that were built.
        redrawn: whether their weights are drawn anew.
        in_short: whether the short source of `redrawing_of` does that, or else `redraw_weights`.
    """
    raw, placed, other = (f"{word}=" in body for word in ("redrawn", "device", "seed"))
    takes = ", redrawn=True" * raw + ', device="cpu"' * placed + f", seed={WEIGHT_SEED}" * other
    ready = f"model{'.to(device)' * placed}{cast_of(models)}.eval()"
    if (in_short or not redrawn) and all(isinstance(model, nn.Module) for model in models):
        made = ready.replace("model", "build(config)", 1)
        gives = [f"    return {f'redrawn_to_unit_gain({made})' if redrawn else made}"]
        if redrawn and raw:
            gives = [f"    model = {made}", "return redrawn_to_unit_gain(model) if redrawn else model"]
        return "\n    ".join(
            [
                f"def {MADE}(config, dtype{takes}):",
                "with torch.random.fork_rng(devices=[]):",
                f"    torch.manual_seed({'seed' if other else WEIGHT_SEED})",
                *gives,
            ]
        )
    after = [f"model = {ready}", *["if redrawn:"] * (redrawn and raw)]
    anew = "redrawn_to_unit_gain(model)" if in_short else f"redraw_weights(model, {WEIGHT_SEED})"
    after += [f"{'    ' * raw}{anew}"] * redrawn
    if all(isinstance(model, nn.Module) for model in models):
        built = [
            f"        {ready.replace('model', 'model = build(config)', 1)}",
            *(f"    {line}" for line in after[1:]),
        ]
    else:  # of functions there is nothing to be placed
        built = ["        model = build(config)", "    if isinstance(model, torch.nn.Module):"]
        built += [f"        {line}" for line in after]
    return "\n".join(
        [
            f"def {MADE}(config, dtype{takes}):",
            "    with torch.random.fork_rng(devices=[]):",
            f"        torch.manual_seed({'seed' if other else WEIGHT_SEED})",
            *built,
            "    return model",
        ]
    )


def cast_of(models: Sequence[Any], dtype: str = "dtype") -> str:
    """Return the source, from its point on, of what `cast` does to models; `dtype` is the source of theirs."""
    if not any(is_partly_complex(model) for model in models if isinstance(model, nn.Module)):
        return f".to({dtype})"
    pairs = f"t.to(torch.complex128 if {dtype} == torch.float64 else torch.complex64) if t.is_complex() else t"
    return f"._apply(\n        lambda t: t.to({dtype}) if t.is_floating_point() else {pairs})"


_REDRAWING = """def redrawn_to_unit_gain(model):  # the small weights of a fresh model hide errors
    generator = torch.Generator().manual_seed({seed})
    tables = {{id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}}
    for p in model.parameters():
        noise, old = torch.randn(p.shape, generator=generator, dtype={drawn}), p.detach().double()
        value = old * (1 + 0.25 * noise.clamp(-2, 2)) + 0.05 * noise
        if p.ndim >= 2:
            value = noise if id(p) in tables else noise / p[0].numel() ** 0.5
        elif (old == old[0]).all() and old[0] in (0, 1):
            value = 1 + 0.25 * noise.clamp(-2, 2) if old[0] else 0.25 * noise
        p.data.copy_(value)
    return model"""


def redrawing_of(models: Sequence[Any]) -> str:
    """Return a short source of what `redraw_weights` does, which gives models the same weights; "" where none does."""
    modules = [part for model in models if isinstance(model, nn.Module) for part in model.modules()]
    parameters = [p for part in modules for p in part.parameters(recurse=False)]
    usual = all(
        p.is_floating_point() and p.numel() and p.ndim and p.requires_grad and p.device.type == "cpu"
        for p in parameters
    )
    others = [m for m in modules if type(m).__name__ == "Conv1D" or getattr(m, "padding_idx", None) is not None]
    if not usual or others:
        return ""
    is_small = all(p.numel() <= 2048 for p in parameters)
    drawn = "torch.float64" if is_small else "torch.float64 if p.numel() <= 2048 else torch.float32"
    return _REDRAWING.format(seed=WEIGHT_SEED, drawn=drawn)


def names_made(chunks: Iterable[str]) -> frozenset[str]:
    """Return the names that chunks of source define."""
    return frozenset(
        found
        for chunk in chunks
        for found in re.findall(r"^(?:def|class) (\w+)|^(\w+) = ", chunk, re.M)
        for found in found
        if found
    )


def names_used(source: str) -> frozenset[str]:
    """Return the names that source reads; the modules and attributes that it names are none."""
    return frozenset(node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name))
