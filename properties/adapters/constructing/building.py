"""How somebody's class is built from drawn sizes: by its arguments, or by the configuration that it takes."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from veriformer.properties.adapters.constructing.choices import choice_of, guess_of, settings_of
from veriformer.properties.adapters.constructing.configurations import Configuration, configurations, own_configurations
from veriformer.properties.adapters.constructing.ready_made import class_of_part, is_module, made_by
from veriformer.properties.adapters.constructing.size_names import expression_for, is_padding_id, meanings
from veriformer.properties.adapters.unknown.written import USER, attempt
from veriformer.properties.subject.raised import told
from veriformer.properties.subject.sizes import DrawnConfig

_CONFIGURES = ("config", "cfg", "args", "params", "hparams", "conf", "opt", "options", "settings", "configuration",
               "configs", "model_args", "model_config", "hyperparameters", "hp", "c", "model_cfg",
               "h_params")  # fmt: skip

_GUESSED = "{} = {} was guessed; if that is not ordinary, write a Subject with build="
_DEPTH = 3  # parts of parts


def is_a_configuration(name: str) -> bool:
    """Whether an argument takes a configuration by its name."""
    return name.lower() in _CONFIGURES


@dataclass(frozen=True)
class Recipe:
    """How a thing is built.

    Attributes:
        source: of `build(c)`.
        names: what the source uses besides.
        sizes: the drawn sizes that it uses; none: it is built at its own.
        padding_id: the source of the id of the token that pads, where the constructor takes one.
        notes: what was guessed, one sentence each.
    """

    source: str
    names: Mapping[str, Any]
    sizes: frozenset[str] = frozenset()
    padding_id: str = ""
    notes: tuple[str, ...] = field(default=())


class NotBuiltError(TypeError):
    """A class cannot be built from drawn sizes; says what it needs."""


def recipe_of(thing: Any) -> Recipe:
    """Find out how a class, or a function that makes a module, is built.

    Raises:
        NotBuiltError: it needs an argument that means nothing known, or raises whatever is tried.
    """
    user, called = reached(thing)
    try:
        parameters = [p for p in inspect.signature(thing).parameters.values()
                      if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]  # fmt: skip
    except (TypeError, ValueError) as problem:
        raise NotBuiltError(f"{called} has no signature: {problem}") from problem
    problems: list[Exception] = []
    missing = ""
    for arguments in _ways(thing, parameters, sys.modules.get(thing.__module__)):
        if isinstance(arguments, str):
            missing = missing or arguments
            continue
        recipe = _recipe(called, user, arguments)
        try:
            attempt(recipe.source, "build", recipe.names)(DrawnConfig())
            if recipe.sizes:
                return recipe
            return replace(recipe, notes=(*recipe.notes, f"{thing.__name__} takes no sizes: judged at its own"))
        except Exception as problem:
            problems.append(problem)
    name = getattr(thing, "__name__", str(thing))
    if problems:
        raise NotBuiltError(f"{name} cannot be built from drawn sizes: {told(problems[0])}") from problems[0]
    elsewhere = made_by(thing)
    raise NotBuiltError(
        f"{name} needs the argument {missing!r}, which is no size that is known here; {elsewhere}write "
        f"Subject(kind=..., build=lambda c: {name}(...), forward=lambda m, x: m(x))"
    )


def own_recipe(thing: Any) -> Recipe | None:
    """Return how a class is built at its own sizes, with what it needs alone; None where that is not known."""
    user, called = reached(thing)
    note = f"{thing.__name__} cannot be built or called at drawn sizes: judged at its own"
    parameters = inspect.signature(thing).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    given, unknown = _given(thing, required)
    ways = [] if unknown else [_recipe(called, user, given)]
    if len(required) == 1 and required[0].name.lower() in _CONFIGURES:
        module, annotated = sys.modules.get(thing.__module__), _type_of(thing, required[0])
        ways += [replace(ways_of, sizes=frozenset()) for ways_of in (
            _recipe(called, user, _Arguments({required[0].name: one.expression}, one.names))
            for one in own_configurations(thing, annotated, module))]  # fmt: skip
    for recipe in ways:
        try:
            attempt(recipe.source, "build", recipe.names)(DrawnConfig())
        except Exception:
            continue
        return replace(recipe, notes=(note,))
    return None


def reached(thing: Any) -> tuple[dict[str, Any], str]:
    """Return the names by which source reaches a class or function, and the expression that does."""
    module = sys.modules.get(getattr(thing, "__module__", "") or "")
    found: Any = module
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    if module is not None and found is thing and not module.__name__.startswith("veriformer.properties.understood"):
        return {USER: module}, f"{USER}.{thing.__qualname__}"
    name = thing.__name__ if thing.__name__.isidentifier() else "made"  # a name may be any text
    return {USER: module, name: thing}, name


@dataclass(frozen=True)
class _Arguments:
    given: Mapping[str, str]
    names: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    guesses: tuple[str, ...] = ()
    configuration: Configuration | None = None
    argument: str = ""


def _ways(
    thing: Any, parameters: list[inspect.Parameter], module: types.ModuleType | None
) -> Iterator[_Arguments | str]:
    """Yield the arguments to try; or the name of one that nothing is known for."""
    required = [p for p in parameters if p.default is p.empty]
    holder = next((p for p in parameters if p.name.lower() in _CONFIGURES), None)
    if holder is None and len(required) == 1 and not meanings([required[0].name]):
        holder = required[0]
    if holder is not None and (holder.default in (holder.empty, None) or hasattr(holder.default, "__dict__")):
        others = [p for p in parameters if p is not holder and p.default is p.empty]
        given, unknown = _given(thing, others)
        if not unknown:
            there = module if holder.name.lower() in _CONFIGURES else None
            build = partial(_with_the_others, thing, holder.name, given)
            for found in configurations(thing, _type_of(thing, holder), there, build):
                if isinstance(found, str):
                    yield f"{holder.name}.{found}"
                else:
                    yield replace(given, configuration=found, argument=holder.name)
    given, unknown = _given(thing, parameters)
    yield unknown or given


def _with_the_others(thing: Any, name: str, others: _Arguments, configuration: Any) -> Any:
    """Call a thing with a configuration, and with the arguments that it needs besides."""
    words = {n: eval(v, {"c": DrawnConfig(), "torch": torch, **others.names}) for n, v in others.given.items()}
    return thing(**{name: configuration}, **words)


def _given(thing: Any, parameters: list[inspect.Parameter], depth: int = 0) -> tuple[_Arguments, str]:
    """Return the source of each argument, and the first required one that nothing is known for.

    Args:
        thing: what is built.
        parameters: its arguments.
        depth: of the parts that it is one of.
    """
    known = meanings(p.name for p in parameters)
    pads = any(is_padding_id(p.name) for p in parameters)
    given: dict[str, str] = {}
    names: dict[str, Any] = {}
    sizes: dict[str, str] = {}
    guesses: list[str] = []
    for p in parameters:
        is_required = p.default is p.empty
        annotated = _type_of(thing, p)
        is_number = not (is_required and is_module(annotated))
        value = expression_for(p.name, known.get(p.name), p.default, pads=pads, is_required=is_required)
        if value is not None and is_number:
            given[p.name] = value
            continue
        if not is_required:
            continue
        if (choice := choice_of(thing, p.name, annotated)) is not None:
            given[p.name] = choice[0]
            names |= choice[1]
        elif (found := _settings(thing, annotated)) is not None:
            given[p.name] = found.expression
            names |= found.names
            sizes |= found.given
        elif (part := _part(thing, p.name, annotated, depth)) is not None:
            given[p.name] = part.expression
            names |= part.names
            sizes |= part.given
            guesses += part.told.splitlines()
        elif (number := guess_of(annotated, p.name)) is not None:
            given[p.name] = number
            guesses.append(_GUESSED.format(p.name, number))
        else:
            return _Arguments(given, names, sizes), p.name
    return _Arguments(given, names, sizes, tuple(guesses)), ""


def _settings(thing: Any, annotated: Any) -> Configuration | None:
    """Return settings of a class that an argument is annotated with."""
    if settings_of(annotated) is None:
        return None
    found = (one for one in configurations(thing, annotated, None) if not isinstance(one, str))
    return next((one for one in found if not one.lines and not one.imports), None)


def _part(thing: Any, name: str, annotated: Any, depth: int) -> Configuration | None:
    """Return how a module is made that a constructor takes ready-made, where its class is told by type or by name."""
    cls = class_of_part(thing, name, annotated)
    if cls is None or depth == _DEPTH:
        return None
    parameters = [
        p for p in inspect.signature(cls).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    arguments, unknown = _given(cls, parameters, depth + 1)
    if unknown:
        return None
    words = ", ".join(f"{n}={value}" for n, value in arguments.given.items())
    sizes = {f"{name}.{n}": value for n, value in {**arguments.given, **arguments.sizes}.items()}
    told_of = f"{name} is a {cls.__name__} made here"
    return Configuration(
        f"{cls.__name__}({words})", "\n".join([told_of, *arguments.guesses]),
        names={cls.__name__: cls, **arguments.names}, given=sizes,
    )  # fmt: skip


def _recipe(called: str, user: dict[str, Any], arguments: _Arguments) -> Recipe:
    words = [f"{name}={value}" for name, value in arguments.given.items()]
    lines: list[str] = []
    notes: list[str] = [*arguments.guesses]
    values = {**arguments.given, **arguments.sizes}
    user = {**user, **arguments.names}
    imports: tuple[str, ...] = ()
    if arguments.configuration is not None:
        found = arguments.configuration
        lines += found.lines
        imports = found.imports
        user = {**user, **found.names}
        words.insert(0, f"{arguments.argument}={found.expression}")
        values |= found.given
        notes += [_GUESSED.format(f"{arguments.argument}.{name}", 2) for name in found.guessed]
        notes.append(f"built with {found.told}")
    body = "\n".join(f"    {line}" for line in [*lines, f"return {called}({', '.join(words)})"])
    source = "\n".join([*imports, *[""] * (2 * bool(imports)), "def build(c):", body]) + "\n"
    sizes = {f.name for f in dataclasses.fields(DrawnConfig)} & {w[2:] for v in values.values() for w in v.split()
                                                                 if w.startswith("c.")}  # fmt: skip
    if "c.d_head" in values.values():
        sizes |= {"d_model", "num_heads"}
    padding = next((v for n, v in values.items() if is_padding_id(n)), "")
    return Recipe(source, user, frozenset(sizes), padding, tuple(notes))


def _type_of(thing: Any, parameter: inspect.Parameter) -> Any:
    """Return the type that an argument is annotated with, strings resolved; None without one."""
    function: Callable[..., Any] = vars(thing).get("__init__", thing) if isinstance(thing, type) else thing
    if parameter.default is not parameter.empty and hasattr(parameter.default, "__dict__"):
        return type(parameter.default)
    try:
        return typing.get_type_hints(function).get(parameter.name)
    except Exception:  # names that are imported for type checkers alone
        named = parameter.annotation
        if isinstance(named, str):
            return getattr(sys.modules.get(thing.__module__), named.strip("'\""), None)
        return None if named is parameter.empty else named
