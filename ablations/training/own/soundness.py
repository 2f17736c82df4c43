"""What makes an own study's seeds no sample, or its test no test: told beside its rows, whatever they say."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from veriformer.ablations.tasks.task import is_function
from veriformer.ablations.training.own.building import built
from veriformer.ablations.training.own.evaluation import of_the_evaluation
from veriformer.ablations.training.own.feeding import first_batches, held_out_batches, repeats, training_batches
from veriformer.ablations.trials.own import Parts
from veriformer.ablations.trials.trial import Trial

_LOOKED_AT = 8
"""Batches of training, and of what is held out, that are compared."""

_FEW = 0.1
"""Share of held-out samples that are trained on too, below which nothing is said: short samples repeat by chance."""

_CPU = torch.device("cpu")


def soundness(parts: Parts, trial: Trial, other: Trial) -> list[str]:
    """Return, in sentences, what is wrong with the seeds of a study and with what it is tested on.

    Args:
        parts: of the study.
        trial: of one seed.
        other: the same of another seed.

    Raises:
        OwnCodeError: the user's code raised.
    """
    return [
        *_of_the_data(parts, trial, other),
        *_of_the_starts(parts, trial, other),
        *_of_the_test(parts, trial),
        *of_the_evaluation(parts, trial),
    ]


def _of_the_data(parts: Parts, trial: Trial, other: Trial) -> Iterator[str]:
    name = parts.task.name
    if not repeats(parts, trial, _CPU):
        yield (
            f"{name} gave other data when it was asked again for the same seed: variants are not trained on the same, "
            "and their seeds are no pairs; draw from a generator of the seed"
        )
        return
    if not is_function(parts.task.data):
        return  # batches of one's own are in the order that they were given in
    one, two = (_tensors(batch) for batch in first_batches(parts, [trial, other], _CPU))
    if one and len(one) == len(two) and all(map(_same, one, two)):
        yield (
            f"{name} gives every seed the same data: seeds differ by their initial weights alone, and what they say is "
            "of this data, not of its kind; draw from a generator of the seed"
        )


def _of_the_starts(parts: Parts, trial: Trial, other: Trial) -> Iterator[str]:
    one, two = (dict(built(parts, t, _CPU).named_parameters()) for t in (trial, other))
    trained = [p for p in one.values() if p.requires_grad]
    is_drawn = any(p.numel() > 1 and bool((p != p.flatten()[0]).any()) for p in trained)
    if is_drawn and one.keys() == two.keys() and all(_same(p, two[n]) for n, p in one.items()):
        yield (
            "every seed starts with the same weights (is a seed set where the model is built?): seeds differ by their "
            "data alone"
        )


def _of_the_test(parts: Parts, trial: Trial) -> Iterator[str]:
    """Compare samples that are held out with those that are trained on, where a batch is made of tensors."""
    seen, tested = training_batches(parts.task, trial, _CPU), held_out_batches(parts.task, _CPU)
    trained = {key for batch in islice(seen, _LOOKED_AT) for key in _samples(batch)}
    held = [key for batch in islice(tested, _LOOKED_AT) for key in _samples(batch)]
    share = sum(key in trained for key in held) / max(1, len(held))
    if share >= _FEW:
        yield (
            f"{parts.task.name}: {share:.0%} of the held-out samples that were compared are also trained on: what is "
            "tested is what was learned by heart"
        )


def _tensors(batch: Any) -> list[Tensor]:
    return [x for x in pytree.tree_flatten(batch)[0] if isinstance(x, Tensor)]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _samples(batch: Any) -> list[bytes]:
    """Return what tells one sample of a batch from another: the bytes of its rows of all tensors."""
    tensors = [x.detach().contiguous() for x in _tensors(batch) if x.ndim]
    if not tensors or len({len(x) for x in tensors}) != 1:
        return []
    rows = [
        x.reshape(len(x), -1).view(torch.uint8).numpy() if x.dtype != torch.bool else x.reshape(len(x), -1).numpy()
        for x in tensors
        if x.numel()
    ]
    return [b"".join(part[i].tobytes() for part in rows) for i in range(len(tensors[0]))]
