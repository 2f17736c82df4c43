"""The configuration that a constructor takes: a class of any make, a dict, a namespace; as source of a small one."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from veriformer.properties.adapters.constructing.choices import by_type, choice_of
from veriformer.properties.adapters.constructing.size_names import expression_for, is_padding_id, meanings

_NAMED = re.compile(r"(?i)\w*(config|cfg|args|params|hparams|conf|hyper)\w*")
_MISSING = object()
_GUESSES = 3
"""Names of a configuration that are given a number without knowing what they mean; of more, none."""


@dataclass(frozen=True)
class Configuration:
    """Source that makes a configuration of the drawn sizes `c`.

    Attributes:
        expression: that gives it.
        told: what it is, for the report.
        lines: that stand before the expression.
        imports: that the source needs.
        names: that it uses beside the user's module.
        given: the values that are set, as source, by name.
        guessed: the names of those of which nothing is known, a number each.
    """

    expression: str
    told: str
    lines: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    names: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    guessed: tuple[str, ...] = ()


def configurations(
    thing: Any, annotated: Any, module: types.ModuleType | None, build: Callable[[Any], Any] | None = None
) -> Iterator[Configuration | str]:
    """Yield the configurations that a class may take, the surest first; or what one is asked for that is not known.

    Args:
        thing: class or function that takes one.
        annotated: type that it says the argument has; None if it says none.
        module: of the thing, where a configuration is looked for by name; None: not by name.
        build: the thing, called with a configuration and all that it needs besides; None where it needs nothing.
    """
    default = getattr(thing, "get_default_config", None)
    if callable(default):
        yield from _changed(default(), f"user.{thing.__qualname__}.get_default_config()", "its get_default_config()")
    classes = [one for one in _alternatives(annotated) if isinstance(one, type)]
    classes += [one for one in (getattr(thing, "config_class", None),) if isinstance(one, type)]
    there = vars(module) if module is not None else {}
    classes += [v for n, v in there.items() if isinstance(v, type) and _NAMED.fullmatch(n)]
    for one in dict.fromkeys(classes):
        if one is not dict and not issubclass(one, argparse.Namespace | types.SimpleNamespace):
            yield from _of_class(one, module)
    for name, value in there.items():
        if isinstance(value, dict) and len(meanings(n for n in value if isinstance(n, str))) >= 2:
            yield from _of_dict(value, name)
        elif _NAMED.fullmatch(name) and not isinstance(value, type | types.ModuleType) and hasattr(value, "__dict__"):
            if callable(value):
                continue
            yield from _changed(value, f"copy.copy(user.{name})", f"a copy of {name}", ("import copy",))
    for name, value in there.items():
        if inspect.isfunction(value) and _NAMED.fullmatch(name) and value.__module__ == there.get("__name__"):
            yield from _of_parser(value, name)
    yield from _asked_for(build or thing)


def own_configurations(thing: Any, annotated: Any, module: types.ModuleType | None) -> Iterator[Configuration]:
    """Yield the configurations for a class as they are, which a module makes without arguments.

    Args:
        thing: class that takes one.
        annotated: type that it says the argument has; None if it says none.
        module: of the thing.
    """
    there = vars(module) if module is not None else {}
    classes = [one for one in (*_alternatives(annotated), getattr(thing, "config_class", None)) if one is not None]
    names = [name for one in classes if there.get(name := getattr(one, "__name__", "")) is one]
    names += [
        name
        for name, value in there.items()
        if _NAMED.fullmatch(name) and (isinstance(value, type) or inspect.isfunction(value))
        if getattr(value, "__module__", "") == there["__name__"]
    ]
    for name in dict.fromkeys(names):
        yield Configuration(f"user.{name}()", f"{name}()")


def _alternatives(annotated: Any) -> list[Any]:
    return [annotated, *typing.get_args(annotated)]


def _of_class(cls: type, module: types.ModuleType | None) -> Iterator[Configuration]:
    """Yield what a class of configurations makes: its fields are the arguments that it takes, whatever makes them."""
    if typing.is_typeddict(cls):
        values, _ = _values(dict.fromkeys(cls.__annotations__, _MISSING))
        if values is not None:
            inner = ", ".join(f"{name!r}: {value}" for name, value in values.items())
            yield Configuration(f"{{{inner}}}", f"a dict as {cls.__name__} says", given=values)
        return
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return
    fields = {p.name: _MISSING if p.default is p.empty else p.default for p in parameters
              if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}  # fmt: skip
    fields = {name: _default_of(cls, name, value) for name, value in fields.items()}
    chosen, used = _chosen(cls, [name for name, value in fields.items() if value is _MISSING])
    values, _ = _values({name: value for name, value in fields.items() if name not in chosen})
    if values is None or (not values and not chosen and fields):
        return
    values = {name: text for name in fields if (text := chosen.get(name, values.get(name))) is not None}
    own = sys.modules.get(cls.__module__)
    is_there = module is not None and getattr(module, cls.__name__, None) is cls
    names = used if is_there else {cls.__name__: cls, **used}
    called = f"user.{cls.__name__}" if is_there or own is module else cls.__name__
    if not fields:  # a class of settings without arguments, its values class attributes or set in __init__
        with contextlib.suppress(Exception):
            yield from _changed(cls(), f"{called}()", f"{cls.__name__} with the drawn sizes", names=names)
        return
    inner = ", ".join(f"{name}={value}" for name, value in values.items())
    yield Configuration(f"{called}({inner})", f"{cls.__name__}({_told(values)})", names=names, given=values)


def _chosen(cls: type, required: list[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the source of those required fields that are no sizes, by what their types say, and the names it uses."""
    known = meanings(required)
    try:
        kinds = typing.get_type_hints(cls)
    except Exception:  # names that are imported for type checkers alone
        kinds = {}
    chosen, names = dict[str, str](), dict[str, Any]()
    for name in required:
        if expression_for(name, known.get(name), _MISSING, pads=False, is_required=True) is not None:
            continue
        if (choice := choice_of(cls, name, kinds.get(name, object))) is not None:
            chosen[name] = choice[0]
            names |= choice[1]
        elif (text := by_type(kinds.get(name))) is not None:
            chosen[name] = text
    return chosen, names


def _default_of(cls: type, name: str, default: Any) -> Any:
    """Return the default of a field where the signature does not show it: of pydantic's, and of factories."""
    known = getattr(cls, "model_fields", {}).get(name) if isinstance(getattr(cls, "model_fields", None), dict) else None
    if known is not None and known.is_required():
        return _MISSING
    return default


def _of_dict(value: dict[str, Any], name: str) -> Iterator[Configuration]:
    values, _ = _values(value)
    if values:
        inner = ", ".join(f"{n!r}: {v}" for n, v in values.items())
        yield Configuration(f"{{**user.{name}, {inner}}}", f"{name} with {_told(values)}", given=values)


def _changed(
    value: Any, expression: str, told: str, imports: tuple[str, ...] = (), names: Mapping[str, Any] | None = None
) -> Iterator[Configuration]:
    """Yield an object whose attributes are set anew."""
    own = {**{n: v for n, v in vars(type(value)).items() if not n.startswith("_") and not callable(v)}, **vars(value)}
    values, _ = _values({n: v for n, v in own.items() if isinstance(n, str) and n.isidentifier()})
    if not values:
        return
    sizes = [n for n, v in own.items() if n in values and v is None]
    if own.get("model_type") is not None and sizes:
        values = {**values, "model_type": "None"}  # a released one by name, or sizes
    lines = (f"config = {expression}", *(f"config.{n} = {v}" for n, v in values.items()))
    yield Configuration("config", f"{told}, {_told(values)}", lines, imports, names or {}, values)


def _of_parser(function: Any, name: str) -> Iterator[Configuration]:
    """Yield what the user's own function reads from an empty command line."""
    takes = list(inspect.signature(function).parameters)
    if len(takes) > 1:
        return
    before = sys.argv
    sys.argv = before[:1]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            found = function([]) if takes else function()
    except (Exception, SystemExit):
        return
    finally:
        sys.argv = before
    if isinstance(found, argparse.Namespace | types.SimpleNamespace):
        values, _ = _values(vars(found))
        plain = {n: repr(v) for n, v in vars(found).items() if isinstance(v, int | float | str | bool | None)}
        if values:
            inner = ", ".join(f"{n}={v}" for n, v in {**plain, **values}.items())
            yield Configuration(f"types.SimpleNamespace({inner})", f"what {name}() gives, {_told(values)}", (),
                                ("import types",), given=values)  # fmt: skip


class _Asked(dict[str, Any]):
    """Notes the names that a constructor asks of its configuration, as attributes or as keys."""

    def __init__(self, guessed: tuple[str, ...]) -> None:
        super().__init__()
        self.names: dict[str, bool] = {}
        self.guessed = guessed
        self.unknown = ""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and (found := self._answer(name, True)) is not None:
            return found
        raise AttributeError(name)

    def __getitem__(self, name: str) -> Any:
        if (found := self._answer(name, False)) is not None:
            return found
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        return default if default is not None else self._answer(name, False)

    def _answer(self, name: str, is_attribute: bool) -> Any:
        values, _ = _values(dict.fromkeys([*self.names, name], _MISSING), self.guessed)
        if values is None:
            self.unknown = name
            return None
        self.names[name] = is_attribute
        from veriformer.properties.subject.sizes import DrawnConfig

        return eval(values[name], {"c": DrawnConfig()})


def _asked_for(build: Callable[[Any], Any]) -> Iterator[Configuration | str]:
    """Yield a namespace, or a dict, of the names that the constructor asks for; or the name that is not known."""
    guessed: tuple[str, ...] = ()
    while True:
        asked = _Asked(guessed)
        try:
            build(asked)
        except (AttributeError, KeyError) as problem:
            if (name := asked.unknown) and name in str(problem):  # without a default: a number, if it is one
                if len(guessed) == _GUESSES:
                    yield guessed[0]
                    return
                guessed = (*guessed, name)
                continue
        except Exception:
            pass
        break
    values, _ = _values(dict.fromkeys(asked.names, _MISSING), guessed)
    if not values:
        return
    told = f"a namespace of what it asks for, {_told(values)}"
    if all(asked.names.values()):
        inner = ", ".join(f"{n}={v}" for n, v in values.items())
        yield Configuration(
            f"types.SimpleNamespace({inner})", told, (), ("import types",), given=values, guessed=guessed
        )
    else:
        inner = ", ".join(f"{n!r}: {v}" for n, v in values.items())
        yield Configuration(f"{{{inner}}}", told.replace("namespace", "dict"), given=values, guessed=guessed)
    if guessed:
        yield guessed[0]


def _values(fields: Mapping[str, Any], guessed: tuple[str, ...] = ()) -> tuple[dict[str, str] | None, str]:
    """Return the source of what each field becomes; None, and its name, where one is required and nothing known.

    Args:
        fields: names, and the defaults that they have.
        guessed: those that become a number all the same.
    """
    known = meanings(fields)
    pads = any(is_padding_id(n) for n in fields)
    values: dict[str, str] = {}
    for name, default in fields.items():
        is_required = default is _MISSING
        found = expression_for(name, known.get(name), default, pads=pads, is_required=is_required)
        if found is not None:
            values[name] = found
        elif name in guessed:
            values[name] = "2"
        elif is_required:
            return None, name
    return values, ""


def _told(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
