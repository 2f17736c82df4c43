"""Theorems hold for what they are about, and fail for what they are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from veriformer.ablations.training.exactness import ROUNDING, permutation, reversal, source
from veriformer.ablations.training.loop import train
from veriformer.ablations.trials.models import reference_model, views_model
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.trials.trial import Trial

CONFIG = {"architecture": "classifier", "vocab_size": 8, "d_model": 16, "num_heads": 2, "num_layers": 2, "max_len": 8}
TOKENS = torch.randint(8, (16, 8), generator=torch.Generator().manual_seed(0))


def model(**changes: object) -> torch.nn.Module:
    return reference_model({**CONFIG, **changes}, 0).double().eval()


@pytest.mark.parametrize("pooling", ["mean", "max", "weighted", "cls"])
def test_no_positions_no_order(pooling: str) -> None:
    assert permutation(model(positions="none", pooling=pooling), TOKENS).holds


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "alibi", "t5"])
def test_positions_are_seen(positions: str) -> None:
    found = permutation(model(positions=positions), TOKENS)
    assert not found.holds
    assert found.difference > 1e3 * ROUNDING


def test_symmetric_alibi_cannot_tell_the_reverse_but_tells_other_orders() -> None:
    alibi = model(positions="alibi")
    assert reversal(alibi, TOKENS).holds
    assert not permutation(alibi, TOKENS).holds


@pytest.mark.parametrize("positions", ["learned", "rotary", "t5"])
def test_the_reverse_is_told_elsewhere(positions: str) -> None:
    assert not reversal(model(positions=positions), TOKENS).holds


@pytest.mark.parametrize("head", ["transformer", "average"])
def test_views_have_no_order(head: str) -> None:
    config = {"head": head, "d_model": 16, "num_heads": 2, "num_layers": 1, "num_classes": 4}
    images = torch.randn(4, 6, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert permutation(views_model(config, 0).double().eval(), images).holds


def test_without_cross_attention_the_source_is_not_known() -> None:
    config = {
        "architecture": "encoder_decoder", "vocab_size": 9, "d_model": 16, "num_heads": 2, "num_layers": 1,
        "max_len": 16,
    }  # fmt: skip
    trial = Trial(task="translate-reverse", config=config, recipe=Recipe(steps=2), checks=("source",))
    (blind,) = train([replace(trial, edits=("no cross-attention",))])
    assert blind["checks"]["source"] == {"difference": 0.0, "inputs": 128, "holds": True}
    (seeing,) = train([trial])
    assert not seeing["checks"]["source"]["holds"]
    assert seeing["checks"]["source"]["difference"] > 1e3 * ROUNDING
    rows = torch.randint(8, (4, 6), generator=torch.Generator().manual_seed(0))
    assert source(lambda given, _: given.sum(dim=1), torch.ones_like(rows), rows).holds  # type: ignore[arg-type]


def test_the_check_of_a_trained_model_can_fail() -> None:
    wrong = Trial(
        task="precede",
        config={**CONFIG, "positions": "learned", "num_classes": 2},
        recipe=Recipe(steps=5),
        checks=("permutation",),
    )
    (record,) = train([wrong])
    assert record["checks"]["permutation"]["holds"] is False
