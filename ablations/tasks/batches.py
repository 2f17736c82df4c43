"""Batches of a task's own data: a function of the seed and the step, whatever the data is and whoever asks for it."""

from __future__ import annotations

import copy
import hashlib
import inspect
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from veriformer.ablations.tasks.task import Task, is_function

HELD_OUT_SEED = 2**31 - 1
"""Held-out batches come from a seed that no trial has, and that numpy takes too. An odd one: torch's generator keeps 32
bits of a seed, of which 1000 * 2**31 + step leaves the step alone, as seed 0 does."""

HELD_OUT_BATCHES, TESTED_TOGETHER = 8, 256
"""Batches that a function is asked for to test on, and samples of one batch of tensors to test on."""


@contextmanager
def drawing(seed: int, step: int) -> Iterator[None]:
    """Run the block with the generators of torch, numpy and Python seeded by both, and put back as they were.

    What a model or another variant draws in between does not change the data.
    """
    digest = int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:4], "little")
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(digest)
            random.seed(digest)
            np.random.seed(digest)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def batches(task: Task, seed: int, batch_size: int) -> Iterator[Any]:
    """Yield the batches of a seed, as many as are asked for; the same ones whichever variant asks.

    Raises:
        ValueError: there are none.
    """
    data = task.data
    if isinstance(data, Dataset) and not isinstance(data, torch.utils.data.IterableDataset):
        data = DataLoader(data, batch_size=batch_size, shuffle=True)
    if is_function(data) and _takes(data) > 1:
        for step in itertools.count():
            with drawing(seed, step):
                batch = data(seed, step)
            yield batch
    elif _are_tensors(data):
        yield from _drawn(data, seed, batch_size)
    else:
        yield from _again_and_again(data, seed, task.name)


def held_out(task: Task) -> Iterator[Any]:
    """Yield the batches to test on, the same ones for everybody."""
    data = task.held_out
    if data is None:
        made = batches(task, HELD_OUT_SEED, TESTED_TOGETHER)
        yield from itertools.islice(made, HELD_OUT_BATCHES)
        return
    if is_function(data):
        with drawing(HELD_OUT_SEED, -1):
            data = data()
    if _are_tensors(data):
        yield from (tuple(x[i : i + TESTED_TOGETHER] for x in data) for i in range(0, len(data[0]), TESTED_TOGETHER))
        return
    if isinstance(data, Dataset) and not isinstance(data, torch.utils.data.IterableDataset):
        data = DataLoader(data, batch_size=TESTED_TOGETHER)
    yield from _once(data, HELD_OUT_SEED, 0)


def _takes(function: Any) -> int:
    """Return how many arguments a function must be given, two where it does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 2
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters)


def _are_tensors(data: Any) -> bool:
    """Whether this is one tensor for each part of a batch, samples first; a list of tensors is a list of batches."""
    return isinstance(data, tuple) and bool(data) and all(isinstance(x, Tensor) for x in data)


def _drawn(data: Sequence[Tensor], seed: int, batch_size: int) -> Iterator[Any]:
    """Yield batches of the tensors, all samples in a new order each time."""
    generator = torch.Generator().manual_seed(seed)
    total = len(data[0])
    if total == 0 or any(len(x) != total for x in data):
        raise ValueError(f"the tensors of the data have {[len(x) for x in data]} samples; as many of each are required")
    while True:
        order = torch.randperm(total, generator=generator)
        last = max(1, total - total % batch_size)  # whole batches, where there is one
        for start in range(0, last, batch_size):
            yield tuple(x[order[start : start + batch_size]] for x in data)


def _again_and_again(data: Any, seed: int, name: str) -> Iterator[Any]:
    """Go through data again and again; a function is asked for it each time, since it may return a generator."""
    for epoch in itertools.count():
        empty, now = True, data
        if is_function(data):
            with drawing(seed, -1 - epoch):
                now = data(seed)
        for batch in _once(now, seed, epoch):
            empty = False
            yield batch
        if empty:
            raise ValueError(f"the data of task {name!r} gave no batch")


def _once(data: Iterable[Any], seed: int, epoch: int) -> Iterator[Any]:
    """Go through data once; each batch is fetched with generators that the seed, the epoch and its place determine."""
    loader = _in_this_process(data) if isinstance(data, DataLoader) else data
    for owner in (loader, getattr(loader, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed * 100_003 + epoch)
    place = epoch * 1_000_003
    with drawing(seed, place):
        running = iter(loader)
    while True:
        place += 1
        with drawing(seed, place):
            batch = next(running, _END)
        if batch is _END:
            return
        yield batch


_END = object()


def _in_this_process(loader: Any) -> Any:
    """Return the loader without workers: seeds are trained in processes already, which may have none of their own."""
    if loader.num_workers == 0:
        return loader
    loader = copy.copy(loader)
    vars(loader).update(num_workers=0, prefetch_factor=None, persistent_workers=False)  # it guards some by `setattr`
    return loader
