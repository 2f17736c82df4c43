"""Trials of somebody's own model: where its code comes from, and what one variant is made of."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from veriformer.ablations.tasks import TASKS, Task
from veriformer.ablations.trials.edits import EDITS
from veriformer.ablations.trials.models import reference_model

if TYPE_CHECKING:
    from veriformer.ablations.trials.trial import Trial

Edit = Callable[[nn.Module], object]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Code of one's own; plain data that a worker loads it from.

    Attributes:
        target: file or module and attribute, as the command line names it, absolute.
        files: paths below the folder that imports are found from, with the SHA-256 of what was in them.
        libraries: that the files import, with their versions.
    """

    target: str
    files: tuple[tuple[str, str], ...] = ()
    libraries: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> str:
        """A hash of the code and of the libraries' versions, wherever it lies."""
        attribute = self.target.rpartition(":")[2]
        told = json.dumps([attribute, self.files, self.libraries])
        return hashlib.sha256(told.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which row of which own study a trial belongs to."""

    source: Source
    study: str
    setting: str
    variant: str


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a trial of an own study is made of.

    Attributes:
        task: to learn.
        config: keyword arguments of `build`.
        build: makes the model; None: the reference by its configuration.
        edits: names in `veriformer.ablations.trials.edits.EDITS`, or functions that change the built model in place.
        optimizer: from the model; None: AdamW of the recipe.
        step: `(model, optimizer, batch)` to the loss, a whole training step; None: the usual one.
    """

    task: Task
    config: Mapping[str, Any]
    build: Callable[..., Any] | None = None
    edits: tuple[str | Edit, ...] = ()
    optimizer: Callable[[nn.Module], Any] | None = None
    step: Callable[..., Any] | None = None

    def model(self, seed: int) -> nn.Module:
        """Return the untrained model of a seed.

        Raises:
            TypeError: `build` takes no such argument, or does not return a module.
        """
        given = self._arguments()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = reference_model(given, seed) if self.build is None else self.build(**given)
            if not isinstance(model, nn.Module):
                raise TypeError(f"build returned {type(model).__name__}; a torch.nn.Module is required")
            for edit in self.edits:
                (EDITS[edit] if isinstance(edit, str) else edit)(model)
        return model

    def _arguments(self) -> dict[str, Any]:
        """Return what `build` is called with: the configuration, and of what the task fixes that which it takes."""
        task = self.task
        facts: dict[str, Any] = {"vocab_size": task.vocab_size, "num_classes": task.num_classes, "max_len": task.length}
        facts = {name: value for name, value in facts.items() if value}
        if self.build is None:
            return {"architecture": task.architecture} | facts | dict(self.config)
        if task.sample is not None:  # a decoder's sequence holds prompt and answer
            facts["max_len"] = max(x.shape[1] for x in task.draw(0, 2).inputs)
        try:
            parameters = inspect.signature(self.build).parameters.values()
        except (TypeError, ValueError):
            return dict(self.config)
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return facts | dict(self.config)
        for name in self.config:
            if name not in names:
                takes = ", ".join(names) or "nothing"
                raise TypeError(f"the configuration has {name!r}, and build takes {takes}; give build such an argument")
        return {name: value for name, value in facts.items() if name in names} | dict(self.config)


class Owner(Protocol):
    """A study of one's own, as far as a worker asks it."""

    def parts(self, task: str, setting: str, variant: str) -> Parts:
        """Return what a row is made of."""
        ...


@dataclass(frozen=True)
class Loaded:
    """An own study that this process has loaded, and what its code must run in, to find its modules."""

    study: Owner
    entered: Callable[[], AbstractContextManager[object]] = nullcontext


LOADED: dict[tuple[str, str], Loaded] = {}
"""Own studies of this process, by target and name; whoever loads one adds it."""


def at_home(trial: Trial) -> AbstractContextManager[object]:
    """Return what the code of a trial must run in."""
    return nullcontext() if trial.own is None else _loaded(trial.own).entered()


def parts_of(trial: Trial) -> Parts:
    """Return what a trial of an own study is made of.

    Raises:
        LookupError: this process has not loaded the study.
    """
    assert trial.own is not None
    return _loaded(trial.own).study.parts(trial.task, trial.own.setting, trial.own.variant)


def task_of(trial: Trial) -> Task:
    """Return the task of a trial, ours or somebody's own."""
    return TASKS[trial.task] if trial.own is None else parts_of(trial).task


def _loaded(own: Place) -> Loaded:
    try:
        return LOADED[own.source.target, own.study]
    except KeyError:
        raise LookupError(f"{own.source.target} was not loaded here; this is a fault of veriformer's") from None


def plain(value: Any) -> Any:
    """Return a configuration's value as JSON knows it; what it does not is told by its name.

    >>> plain({"act": nn.GELU, "sizes": (1, 2)})
    {'act': 'GELU', 'sizes': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, float | torch.dtype):
        return str(value)
    return str(getattr(value, "__name__", type(value).__name__))
