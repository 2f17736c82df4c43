"""Where a GPU is: the same training on it, seeds together as one by one, the same bits again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from veriformer.ablations.training.loop import train
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.trials.trial import Trial

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: no CUDA device here")

CONFIG = {"architecture": "classifier", "vocab_size": 8, "num_classes": 2, "d_model": 16, "num_heads": 2, "max_len": 8}


def trials(n: int, device: str) -> list[Trial]:
    return [Trial(task="precede", config=CONFIG, recipe=Recipe(steps=8), seed=s, device=device) for s in range(n)]


def losses(records: list[dict[str, Any]]) -> list[list[float]]:
    return [record["curves"]["loss"] for record in records]


def test_together_as_one_by_one() -> None:
    together = losses(train(trials(8, "cuda")))
    for seed, trial in enumerate(trials(8, "cuda")):
        # TF32 is off by default, so rounding is float32's; eight steps stay below 1e-4, and curves are stored to 1e-4
        assert losses(train([trial]))[0] == pytest.approx(together[seed], abs=2e-4)


def test_the_gpu_agrees_with_the_cpu() -> None:
    for one, other in zip(losses(train(trials(2, "cuda"))), losses(train(trials(2, "cpu"))), strict=True):
        assert one == pytest.approx(other, abs=2e-4)


def test_theorems_hold_on_the_gpu() -> None:
    config = {**CONFIG, "positions": "none"}
    trial = replace(trials(1, "cuda")[0], config=config, checks=("permutation",))
    (record,) = train([trial])
    assert record["checks"]["permutation"]["holds"]
