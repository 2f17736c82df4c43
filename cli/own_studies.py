"""Studies of one's own: loaded by their target, here and in every worker."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click
from torch import nn

from veriformer.ablations.execution.work import train_job
from veriformer.ablations.studies.study import Study
from veriformer.ablations.training.own.blame import named
from veriformer.ablations.trials.own import LOADED, Loaded, Place, Source
from veriformer.ablations.trials.trial import Trial
from veriformer.cli.own_sources import changed, source_of
from veriformer.cli.processes.aside import printed_aside
from veriformer.properties.adapters.spawned import announce
from veriformer.properties.adapters.target import FILE, Target, TargetError
from veriformer.properties.targets import at_home, named_by

_ENDED = 70  # the status of a worker that a study ended: EX_SOFTWARE of <sysexits.h>


def is_target(word: str) -> bool:
    """Whether a word of the command line names somebody's own study rather than one of ours."""
    return ":" in word or word.endswith(".py")


def load_studies(word: str) -> list[Study]:
    """Return the studies that a target names, and make them known to this process.

    Args:
        word: `path/file.py:attribute` or `package.module:attribute`: a Study, a list of them, or a function that
            returns either; a path alone gives every Study of the file.

    Raises:
        click.UsageError: it names none.
    """
    try:
        target = _absolute(word)
        with printed_aside(word):
            return [study for study, _ in _loaded(target)]
    except TargetError as problem:
        raise click.UsageError(str(problem)) from None


def train(trials: Sequence[Trial]) -> dict[str, Any]:
    """Train a job in a worker, which loads the study of its trials first.

    Raises:
        RuntimeError: the code here is not the code that the run began with.
    """
    own = trials[0].own
    if own is None:
        return train_job(trials)
    announce()
    with printed_aside(named(trials[0])), _heard_when_it_ends():
        return _train_own(trials, own)


@contextlib.contextmanager
def _heard_when_it_ends() -> Iterator[None]:
    """Let a study that ends this process end it with another status than 0, which a pool takes for a worker's own end.

    It would wait for what the worker was doing for ever.
    """
    own, leave = os.getpid(), os._exit

    def end(status: int) -> NoReturn:
        leave(status or _ENDED if os.getpid() == own else status)

    os._exit = end
    try:
        yield
    finally:
        os._exit = leave


def _train_own(trials: Sequence[Trial], own: Place) -> dict[str, Any]:
    if (own.source.target, own.study) not in LOADED:
        try:
            for study, folder in _loaded(own.source.target, own.source):
                if study.name == own.study and (file := changed(own.source, folder)):
                    raise RuntimeError(f"{file} was changed while the run was under way; run again")
        except TargetError as problem:
            raise RuntimeError(f"the worker cannot load {own.source.target}: {problem}") from None
    return train_job(trials)


def _absolute(word: str) -> str:
    if word.endswith(".py"):
        word += ":*"
    target = Target.parse(word)
    return str(replace(target, place=str(Path(target.place).absolute()))) if target.kind == FILE else word


def _loaded(target: str, source: Source | None = None) -> list[tuple[Study, Path]]:
    """Import what a target names, and put its studies where trials find them; with the folder of their imports."""
    with _everything_or_one(target) as (things, module, folder):
        found = []
        for thing in things:
            if not thing.is_own:  # of our models, data and steps: its trials are those of any study
                found.append((thing, folder))
                continue
            try:
                code = source or source_of(target, module, folder, thing.files)
            except (OSError, SyntaxError) as problem:
                raise TargetError(f"{target}: what the study depends on cannot be read: {problem}") from None
            study = replace(thing, code=code)
            LOADED[target, study.name] = Loaded(study, lambda: at_home(target))
            found.append((study, folder))
    return found


@contextlib.contextmanager
def _everything_or_one(target: str) -> Iterator[tuple[list[Study], Any, Path]]:
    if not target.endswith(":*"):
        with named_by(target) as (thing, module, folder):
            yield _studies(thing, target), module, folder
        return
    with named_by(target.replace(":*", ":__name__")) as (_, module, folder):
        found = {id(v): v for v in vars(module).values() if isinstance(v, Study)}
        if not found:
            raise TargetError(f"{target[:-2]} holds no Study; give path/file.py:attribute of a function that makes one")
        yield list(found.values()), module, folder


def _studies(thing: Any, target: str) -> list[Study]:
    if callable(thing) and not isinstance(thing, Study | type | nn.Module):
        try:
            thing = thing()
        except Exception as problem:
            raise TargetError(
                f"{target} was called to make a study, and raised {type(problem).__name__}: {problem}; a Study of "
                "veriformer.ablations, or a function without arguments that returns one, is required"
            ) from problem
    many = list(thing) if isinstance(thing, list | tuple) else [thing]
    for one in many:
        if not isinstance(one, Study):
            kind = one.__name__ if isinstance(one, type) else type(one).__name__
            raise TargetError(f"{target} is {kind}; a veriformer.ablations.Study, or a list of them, is required")
    if not many:
        raise TargetError(f"{target} is an empty list; at least one Study is required")
    return many
