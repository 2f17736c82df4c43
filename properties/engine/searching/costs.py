"""What a call of a subject costs, and the effort that fits: a large instance is measured before anything is judged.

The effort follows from counted multiplications, so that a run is the same wherever it is made; a machine on which one
forward takes far longer than they should gets a plan of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import given_dtype
from veriformer.properties.bench.pool import parameters_of
from veriformer.properties.bench.profiles import Profile, effort_on_large
from veriformer.properties.bench.watches import CostWatch
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.subject.inputs import has_ordinary_inputs, ordinary
from veriformer.properties.subject.kinds import SEQUENCE_KINDS
from veriformer.properties.subject.palette import LONG

T = TypeVar("T")

_READ = 16
"""A call of fewer tokens takes as long: the weights are read once whatever is multiplied with them."""

_USUAL = 4e10
"""Multiplications a second of one core, in float32; a machine that needs more than twice as long counts as slow."""

_IN_ONE_CALL = 4e11
"""Multiplications of one forward of a large instance, about ten seconds, however much effort there is."""

_STEP, _COUNTED = 5e4, (9, 18)
"""Multiplications in the time of one operation on small tensors; lengths at which operations are counted."""

_ROUNDS = 3  # forwards that are timed; the fastest counts


def _kept(bench: Workbench, key: str, measure: Callable[[], T]) -> T:
    if (key,) not in bench.measured:
        bench.measured[key,] = measure()
    kept: T = bench.measured[key,]
    return kept


def _parameters(bench: Workbench) -> int:
    """Return the number of parameters of the model that far lengths are walked on."""

    def count() -> int:
        own = bench.subject.module  # which may have a length of its own, and so a truth
        return parameters_of(bench.pool.get(bench.pool.reaching[LONG], torch.float32).module if own is None else own)

    return _kept(bench, "parameters", count)


def operations(bench: Workbench, length: int, batch: int = 1) -> float:
    """Estimate the multiplications of one forward of `batch` sequences."""
    config = bench.pool.reaching[LONG]
    # a score costs a product of d_model channels and about a dozen steps of its softmax in each head
    scores = config.num_layers * length**2 * (2 * config.d_model + 12 * config.num_heads)
    return float(batch * (_parameters(bench) * length + scores)) + _STEP * _steps(bench, length)


def loops_too_long(bench: Workbench, length: int) -> bool:
    """Whether a forward that loops over so many positions is beyond the effort at far lengths."""
    return _STEP * _steps(bench, length) > effort_of(bench).far_operations


def _steps(bench: Workbench, length: int) -> float:
    """Estimate the operations of a forward that loops over its positions; 0 where their number does not grow with them.

    A decoder may go through its target token by token, each time through all tokens before. Counted at two lengths.
    """
    few, many = _kept(bench, "operations of short calls", lambda: _counted(bench))
    if many < 1.5 * few or not few:
        return 0.0
    return float(many * (length / _COUNTED[1]) ** math.log2(many / few))


def _counted(bench: Workbench) -> tuple[int, int]:
    """Return the operations of a forward of each of the two lengths, and zeros where it cannot be called."""
    subject = bench.subject
    if subject.kind not in SEQUENCE_KINDS or not has_ordinary_inputs(subject.kind):
        return 0, 0
    if bench.pool.is_large or subject.build is None:
        return 0, 0
    built, found = bench.pool.get(bench.configs[0], torch.float32), []
    inputs = ordinary(subject, built.config, torch.Generator().manual_seed(0), built.dtype)
    for length in _COUNTED:
        tensors = [torch.cat([x[:1]] * length, dim=1)[:, :length].to(bench.device) for x in inputs.tensors]
        try:
            with torch.no_grad(), CostWatch() as watch:
                bench.forward(built, *tensors, *inputs.extras)
        except SubjectError:
            return 0, 0
        found.append(watch.calls)
    return found[0], found[1]


def operations_of_steps(bench: Workbench, length: int) -> float:
    """Estimate the multiplications of two sequences that are decoded token by token."""
    return 2 * length * _short_call(bench)


@dataclass(frozen=True)
class Timed:
    """What one forward on ordinary inputs, two short sequences, takes.

    Attributes:
        seconds: on the clock.
        busy: of the processor, which other processes do not lengthen; on another device as `seconds`.
    """

    seconds: float
    busy: float


def time_of_forward(bench: Workbench) -> Timed:
    """Return how long one forward takes, measured once; zeros for a kind without ordinary inputs.

    Raises:
        SubjectError: it cannot be called.
    """
    return _kept(bench, "time of a forward", lambda: _timed(bench))


def _timed(bench: Workbench) -> Timed:
    if not has_ordinary_inputs(bench.subject.kind):
        return Timed(0.0, 0.0)
    built = bench.pool.get(bench.configs[0], given_dtype(bench))
    inputs = ordinary(bench.subject, built.config, torch.Generator().manual_seed(0), built.dtype)
    tensors = [x.to(bench.device) for x in inputs.tensors]
    taken = []
    with torch.no_grad():
        for _ in range(_ROUNDS + 1):  # the first one warms up
            started, used = time.perf_counter(), time.process_time()
            bench.forward(built, *tensors, *inputs.extras)
            if bench.device.type == "cuda":
                torch.cuda.synchronize(bench.device)
            taken.append((time.perf_counter() - started, time.process_time() - used))
    seconds, busy = (min(times) for times in zip(*taken[1:], strict=True))
    return Timed(seconds, busy if bench.device.type == "cpu" else seconds)


def slowness(bench: Workbench) -> int:
    """Return 1, or 4, 16, ...: about how many times as long as usual this machine needs, coarsely told."""
    try:
        usual = _short_call(bench) / _USUAL
        times = time_of_forward(bench).busy / usual if usual else 1.0
    except SubjectError:
        return 1
    steps = 1
    while times > 8 * steps:  # two calls of a few tokens are told apart by a factor of some, not by percents
        steps *= 4
    return steps


def _short_call(bench: Workbench) -> float:
    return operations(bench, 1) * _READ


def seconds_of(bench: Workbench, length: int) -> float:
    """Estimate the seconds of one forward of so long a sequence from those of a short one."""
    return time_of_forward(bench).seconds * operations(bench, length) / _short_call(bench)


def effort_of(bench: Workbench) -> Profile:
    """Return the effort with which a subject is judged: that of the profile, fitted to the cost of a large one."""
    if not bench.pool.is_large:
        return bench.settings.effort

    def fit() -> Profile:
        slow = slowness(bench)
        short, token = _short_call(bench) * slow, operations(bench, 1) * slow
        fitted = effort_on_large(bench.settings.profile, short, token)
        return replace(fitted, far_operations=fitted.far_operations / slow)

    return _kept(bench, f"effort {bench.settings.profile}", fit)


def affords(bench: Workbench, calls: int, length: int) -> bool:
    """Whether so many forwards of one sequence fit the effort at far lengths."""
    return calls * operations(bench, length) <= effort_of(bench).far_operations


def tries(bench: Workbench, length: int) -> bool:
    """Whether one forward of a sequence beyond `FARTHEST` is worth while, in time for the limit of one call."""
    in_time = not bench.pool.is_large or operations(bench, length) <= _IN_ONE_CALL
    return in_time and affords(bench, 1, length)


def too_costly(bench: Workbench) -> str:
    """Return why something was left out, in words."""
    return f"too costly for the profile {bench.settings.profile}"
