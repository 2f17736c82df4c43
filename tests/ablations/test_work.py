"""What a worker does when memory is short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from veriformer.ablations.execution import work
from veriformer.ablations.trials.trial import Trial, code_digest


def group(seeds: int) -> list[Trial]:
    return [Trial(task="precede", seed=seed) for seed in range(seeds)]


def small_memory(most: int, problem: BaseException) -> Any:
    def train(trials: Sequence[Trial]) -> list[dict[str, Any]]:
        if len(trials) > most:
            raise problem
        return [{"seed": t.seed, "stack": len(trials)} for t in trials]

    return train


@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
    ],
)
def test_a_stack_that_does_not_fit_is_halved(problem: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "train", small_memory(3, problem))
    done = work.train_job(group(7))
    assert [r["seed"] for r in done["records"]] == list(range(7))
    assert [r["stack"] for r in done["records"]] == [3, 3, 3, 2, 2, 2, 2]
    assert done["code"] == code_digest()


def test_one_seed_that_does_not_fit_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "train", small_memory(0, MemoryError()))
    with pytest.raises(MemoryError, match="one seed of precede does not fit into the memory of cpu"):
        work.train_job(group(2))


def test_another_error_is_not_taken_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "train", small_memory(0, RuntimeError("shapes do not match")))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        work.train_job(group(2))


def test_splits_agree_with_the_whole() -> None:
    from veriformer.ablations.training.loop import train
    from veriformer.ablations.trials.recipe import Recipe

    config = {
        "architecture": "classifier",
        "vocab_size": 8,
        "num_classes": 2,
        "d_model": 16,
        "num_heads": 2,
        "max_len": 8,
    }
    trials = [Trial(task="precede", config=config, recipe=Recipe(steps=5), seed=s) for s in range(4)]
    whole, halves = train(trials), train(trials[:2]) + train(trials[2:])
    for one, other in zip(whole, halves, strict=True):
        # five steps apart by rounding alone, and curves are stored to 1e-4
        assert one["curves"]["loss"] == pytest.approx(other["curves"]["loss"], abs=2e-4)
