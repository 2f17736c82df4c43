"""What may be given to a study, put into the one form that it keeps; and what is wrong with it, in one sentence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from veriformer.ablations.tasks import TASKS, Task
from veriformer.ablations.trials.edits import EDITS
from veriformer.ablations.trials.recipe import Recipe

if TYPE_CHECKING:
    from veriformer.ablations.studies.study import Study

_LONGEST = 60
"""Letters of a study's name, which becomes that of files."""


def normalised(study: Study) -> dict[str, Any]:
    """Return the fields of a study in the form that it keeps.

    Raises:
        ValueError: one of them is not what it must be.
        TypeError: likewise.
    """
    called = _file_name(study.name)
    given: Any = study  # of anybody's types
    variants = _all(given.variants, "variants", study.name)
    if not variants:
        raise ValueError(f"study {study.name!r} has no variants; the first is the base, the others are held against it")
    for variant in variants:
        if not hasattr(variant, "recipe") or not hasattr(variant, "removes"):
            raise TypeError(f"study {study.name!r} has {variant!r} among its variants; each must be a Variant")
        if unknown := [e for e in variant.edits if isinstance(e, str) and e not in EDITS]:
            raise ValueError(f"variant {variant.name!r} has the edit {unknown[0]!r}; there are {', '.join(EDITS)}")
    variants = tuple(_with_fields(variant, f"variant {variant.name!r}") for variant in variants)
    settings = _all(given.settings, "settings", study.name)
    settings = tuple(_with_fields(setting, f"setting {setting.name!r}") for setting in settings)
    for what, used in (("variants", [v.name for v in variants]), ("settings", [s.name for s in settings])):
        if twice := {n for n in used if used.count(n) > 1}:
            raise ValueError(f"study {study.name!r} has two {what} called {min(twice)!r}; give one another name")
    if isinstance(given.recipe, Mapping):
        _fields_of_a_recipe(given.recipe, f"study {study.name!r}")
    recipe = Recipe(**given.recipe) if isinstance(given.recipe, Mapping) else given.recipe
    if not isinstance(recipe, Recipe):
        raise TypeError(f"the recipe of study {study.name!r} is {recipe!r}; it must be a Recipe or a dictionary")
    given_tasks = _all((given.tasks,) if isinstance(given.tasks, str | Task) else given.tasks, "tasks", study.name)
    own = {t.name: t for t in given_tasks if isinstance(t, Task)}
    own = {**own, **{name: t for name, t in study.own_tasks.items() if name in given_tasks}}
    names = tuple(t.name if isinstance(t, Task) else t for t in given_tasks)
    if not names:
        raise ValueError(f"study {study.name!r} has no tasks; give a Task, or the name of one that is there")
    for name in names:
        if name not in own and name not in TASKS:
            close = difflib.get_close_matches(str(name), TASKS, n=1)
            guess = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"study {study.name!r} has the task {name!r}; {guess}there are {', '.join(TASKS)}")
    return {
        "name": called,
        "variants": variants,
        "settings": settings,
        "recipe": recipe,
        "tasks": names,
        "own_tasks": own,
        "predictions": _all(given.predictions, "predictions", study.name),
        "lengths": _all(given.lengths, "lengths", study.name),
        "files": _all((given.files,) if isinstance(given.files, str) else given.files, "files", study.name),
    }


def _file_name(given: Any) -> str:
    """Return a study's name with - for all that is no letter, digit, - or _: it becomes the name of files.

    Raises:
        ValueError: nothing of it is left, or it is too long.
    """
    name = re.sub(r"[^\w-]+", "-", given).strip("-") if isinstance(given, str) else ""
    if not 0 < len(name) <= _LONGEST:
        told = repr(given) if len(repr(given)) <= 2 * _LONGEST else f"{repr(given)[: 2 * _LONGEST]} ..."
        raise ValueError(f"a study is called {told}; its name must have 1 to {_LONGEST} letters, digits, - and _")
    return name


def _with_fields(owner: Any, called: str) -> Any:
    """Return a variant or a setting whose recipe is fields by name; a whole Recipe gives all of them."""
    if isinstance(owner.recipe, Recipe):
        return replace(owner, recipe=asdict(owner.recipe))
    _fields_of_a_recipe(owner.recipe, called)
    return owner


def _all(given: Any, what: str, study: str) -> tuple[Any, ...]:
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise TypeError(f"the {what} of study {study!r} are {given!r}; a list of them is required")
    return tuple(given)


def _fields_of_a_recipe(recipe: Mapping[str, Any], owner: str) -> None:
    known = [f.name for f in fields(Recipe)]
    for name in recipe:
        if name not in known:
            raise ValueError(f"{owner} has {name!r} in its recipe; a recipe has {', '.join(known)}")
