"""Losses against torch, masking and schedules against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.reference import objectives, schedules


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_torch(smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(7, (3, 5), generator=generator)
    labels[0, 1] = labels[2] = objectives.IGNORE
    ours = objectives.cross_entropy(logits, labels, label_smoothing=smoothing)
    theirs = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs)


def test_labels_are_shifted_once() -> None:
    assert objectives.shifted(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, objectives.IGNORE]]


def test_a_batch_of_padding_costs_nothing() -> None:
    logits = torch.randn(1, 2, 3, requires_grad=True)
    loss = objectives.cross_entropy(logits, torch.full((1, 2), objectives.IGNORE))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_micro_batches_add_up() -> None:
    logits, labels = torch.randn(4, 3, 5), torch.randint(5, (4, 3))
    labels[0, :2] = objectives.IGNORE
    parts = [(logits[i : i + 1], labels[i : i + 1]) for i in range(4)]
    torch.testing.assert_close(objectives.accumulated_loss(parts), objectives.cross_entropy(logits, labels))


def test_masking_leaves_specials_alone() -> None:
    tokens = torch.randint(0, 20, (64, 64), generator=torch.Generator().manual_seed(1))
    inputs, labels = objectives.mask_tokens(
        tokens, torch.Generator().manual_seed(2), mask_id=4, vocab_size=20, special_ids=(0, 1, 2, 3, 4)
    )
    chosen = labels != objectives.IGNORE
    assert torch.equal(inputs[~chosen], tokens[~chosen])
    assert torch.equal(labels[chosen], tokens[chosen])
    assert not (chosen & (tokens <= 4)).any()


def test_the_noam_rate() -> None:
    rates = [schedules.noam(step, d_model=512, warmup_steps=4000) for step in (0, 1, 2000, 4000, 16000)]
    assert rates[0] == rates[1] == pytest.approx(512**-0.5 * 4000**-1.5)
    assert rates[2] == pytest.approx(rates[3] / 2)
    assert rates[4] == pytest.approx(rates[3] / 2)
    assert math.isfinite(schedules.noam(0, d_model=8, warmup_steps=0))


def test_falling_rates() -> None:
    line = [schedules.linear(s, peak=1, warmup_steps=2, total_steps=10) for s in (0, 2, 6, 10, 11)]
    assert line == pytest.approx([1 / 3, 1, 0.5, 0, 0])
    curve = [schedules.cosine(s, peak=1, warmup_steps=2, total_steps=10, floor=0.2) for s in (0, 2, 6, 10, 99)]
    assert curve == pytest.approx([1 / 3, 1, 0.6, 0.2, 0.2])


def test_groups_are_a_partition() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    decayed, plain = schedules.parameter_groups(model, 0.1)
    assert [list(p.shape) for p in decayed["params"]] == [[3, 4]]
    assert [list(p.shape) for p in plain["params"]] == [[4], [4], [3]]
