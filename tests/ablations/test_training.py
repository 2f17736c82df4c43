"""Training: stacks agree with one by one, seeds are paired, what goes wrong is written down."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from veriformer.ablations.tasks import TASKS
from veriformer.ablations.training.loop import train
from veriformer.ablations.training.observation import Log, attention_entropy, part_of
from veriformer.ablations.training.records import loss_areas
from veriformer.ablations.training.samples import HELD_OUT_SEED, PROBED, training_data
from veriformer.ablations.training.stacking import Stack, build_one
from veriformer.ablations.trials.models import reference_model
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.trials.trial import Trial

CONFIG = {
    "architecture": "classifier", "vocab_size": 8, "num_classes": 2, "d_model": 16, "num_heads": 2, "num_layers": 2,
    "positions": "learned", "max_len": 8,
}  # fmt: skip


def trials(n: int, **changes: Any) -> list[Trial]:
    told = {"task": "precede", "config": CONFIG, "recipe": Recipe(steps=12, warm_up=4), **changes}
    return [Trial(seed=seed, **told) for seed in range(n)]


def without_time(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in ("seconds", "stack", "attention")} for record in records]


def plain_losses(trial: Trial) -> list[float]:
    """The textbook loop: one model, ordinary autograd, ordinary AdamW."""
    model, recipe = build_one(trial), trial.recipe
    samples = TASKS[trial.task].draw(trial.seed, recipe.steps * recipe.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=recipe.weight_decay, betas=(0.9, recipe.beta2))
    losses = []
    for step in range(recipe.steps):
        batch = samples.slice(step * recipe.batch_size, (step + 1) * recipe.batch_size)
        loss = functional.cross_entropy(model(*batch.inputs).flatten(0, -2), batch.labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        if recipe.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize(
    ("task", "architecture", "vocabulary"),
    [("precede", "classifier", 8), ("copy", "decoder", 9), ("translate-sort", "encoder_decoder", 9)],
)
def test_a_stack_trains_as_one_by_one(task: str, architecture: str, vocabulary: int, clip: float) -> None:
    config = {**CONFIG, "architecture": architecture, "vocab_size": vocabulary, "max_len": 16}
    group = trials(3, task=task, config=config, recipe=Recipe(steps=12, warm_up=4, clip=clip))
    stacked = train(group)
    for trial, record in zip(group, stacked, strict=True):
        alone = plain_losses(trial)
        curve = record["curves"]["loss"]
        # measured 1e-7 at the first step; rounding grows by about a half a step, so twelve steps stay below 1e-4, and
        # a stored curve is rounded to six digits
        assert curve == pytest.approx(alone, abs=2e-4)


def test_models_of_a_sweep_train_together_as_alone() -> None:
    rates = [(1e-3, 0, "xavier"), (3e-3, 5, "default"), (1e-2, 2, "gpt2")]
    group = [
        replace(trial, recipe=Recipe(steps=12, learning_rate=rate, warm_up=w, schedule="linear"),
                config={**CONFIG, "init": init})
        for trial, (rate, w, init) in zip(trials(3), rates, strict=True)
    ]  # fmt: skip
    for trial, record in zip(group, train(group), strict=True):
        (alone,) = train([trial])
        # two ways through the same step: at once, or at the largest rate and then a share of the way back
        assert record["curves"]["loss"] == pytest.approx(alone["curves"]["loss"], abs=2e-4)


def test_the_first_step_agrees_to_rounding() -> None:
    group = trials(4)
    stack = Stack(group)
    tokens = torch.stack([TASKS["precede"].draw(t.seed, 8).inputs[0] for t in group])
    together = stack(tokens)
    for index, trial in enumerate(group):
        # sums of at most 64 products in another order: 64 * 2^-24 = 4e-6, relative to values of size one
        torch.testing.assert_close(together[index], build_one(trial)(tokens[index]), rtol=1e-5, atol=1e-5)


def test_results_are_the_same_bits_again() -> None:
    assert without_time(train(trials(3))) == without_time(train(trials(3)))


def test_dropout_is_the_same_again_and_leaves_the_global_state() -> None:
    config = {**CONFIG, "dropout": 0.2, "drop_path": 0.2}
    before = torch.random.get_rng_state()
    first, second = train(trials(2, config=config)), train(trials(2, config=config))
    assert without_time(first) == without_time(second)
    assert torch.equal(before, torch.random.get_rng_state())


def test_variants_of_a_seed_share_weights_where_name_and_shape_agree() -> None:
    learned, none = (reference_model({**CONFIG, "positions": p}, 5) for p in ("learned", "none"))
    other = reference_model(CONFIG, 6)
    mine = dict(learned.named_parameters())
    shared = {n: p for n, p in none.named_parameters() if p.ndim > 1}
    assert shared
    assert all(torch.equal(mine[name], parameter) for name, parameter in shared.items())
    assert not torch.equal(mine["embedding.tokens.weight"], dict(other.named_parameters())["embedding.tokens.weight"])


def test_divergence_is_recorded_not_dropped() -> None:
    records = train(trials(2, recipe=Recipe(steps=20, learning_rate=50.0)))
    assert all(record["diverged"] for record in records)
    assert records[0]["max_loss"] > 10


def test_a_loss_that_is_not_finite_is_recorded() -> None:
    config = {**CONFIG, "norm": "none", "num_layers": 6}
    (record,) = train(trials(1, config=config, recipe=Recipe(steps=30, learning_rate=1e6)))
    assert record["diverged"] == "the loss was not finite"
    assert record["spikes"] >= 0
    assert 0 <= record["accuracy"] <= 1


def test_one_seed_that_diverges_leaves_the_others_alone() -> None:
    group = trials(2, recipe=Recipe(steps=10))
    stack = Stack(group)
    with torch.no_grad():
        stack.parameters["classify.weight"][0] = float("nan")
    tokens = TASKS["precede"].draw(0, 4).inputs[0].expand(2, -1, -1)
    output = stack(tokens)
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


def test_a_fixed_set_of_samples_is_gone_through_again() -> None:
    data = training_data(TASKS["precede"], Recipe(steps=10, num_samples=16), seed=3)
    assert len(data.labels) == 320
    assert len(data.inputs[0].unique(dim=0)) <= 16


def test_the_loss_area_is_that_of_the_held_out_loss() -> None:
    """Nothing is learned at rate 0, so the area is the loss itself; smoothing and dropout are not in it."""
    still = Recipe(steps=10, learning_rate=0.0)
    (plain,) = train(trials(1, recipe=still))
    (smooth,) = train(trials(1, recipe=replace(still, label_smoothing=0.3)))
    (dropped,) = train(trials(1, recipe=still, config={**CONFIG, "dropout": 0.5}))
    model, probe = build_one(trials(1)[0]).eval(), TASKS["precede"].draw(HELD_OUT_SEED + 1, PROBED)
    with torch.no_grad():
        wanted = functional.cross_entropy(model(*probe.inputs), probe.labels).item()
    assert plain["loss_area"] == pytest.approx(wanted, rel=1e-5)
    assert smooth["loss_area"] == dropped["loss_area"] == plain["loss_area"]
    assert smooth["curves"]["loss"] == plain["curves"]["loss"]
    assert dropped["curves"]["loss"] != plain["curves"]["loss"]


def test_the_loss_area_is_a_trapezium_between_tests() -> None:
    log = Log(torch.zeros(4, 2), torch.zeros(4, 2), tested_at=[0, 1, 4])
    log.tests = [torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, float("nan")])]
    first, second = loss_areas(log).tolist()
    assert first == pytest.approx((1.5 * 1 + 0.5 * 3) / 4)
    assert math.isnan(second)


def test_bfloat16_autocast_and_label_smoothing_train() -> None:
    for change in ({"autocast": True}, {"label_smoothing": 0.1}):
        (record,) = train(trials(1, recipe=replace(Recipe(steps=10), **change)))
        assert record["diverged"] is None


def test_what_is_recorded() -> None:
    record = train(trials(2, lengths=(16,), config={**CONFIG, "max_len": 16}))[0]
    assert set(record["curves"]["gradient_norm"]) == {"embedding", "layer 1", "layer 2", "output"}
    assert len(record["curves"]["entropy"][0]) == 2
    assert len(record["curves"]["entropy"][0][0]) == 2
    assert record["lengths"].keys() == {"16"}
    assert len(record["attention"]) == 2
    assert record["stack"] == 2
    for rows in record["attention"]:
        assert torch.tensor(rows).sum(dim=-1) == pytest.approx(1, abs=1e-3)


def test_gradient_norms_are_those_of_autograd() -> None:
    group = trials(2, recipe=Recipe(steps=1))
    record = train(group)[1]
    model = build_one(group[1])
    batch = TASKS["precede"].draw(1, 32)
    functional.cross_entropy(model(*batch.inputs), batch.labels).backward()
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            squares[part_of(name)] = squares.get(part_of(name), 0) + float(parameter.grad.square().sum())
    for part, values in record["curves"]["gradient_norm"].items():
        assert values[0] == pytest.approx(squares[part] ** 0.5, rel=1e-3)


def test_entropy_of_uniform_and_of_one_key() -> None:
    uniform = torch.full((1, 2, 3, 4, 4), 0.25)
    assert torch.allclose(attention_entropy(uniform), torch.ones(1, 3))
    one = torch.eye(4).expand(1, 2, 3, 4, 4)
    assert torch.allclose(attention_entropy(one), torch.zeros(1, 3))
    causal = torch.ones(4, 4).tril()
    causal = (causal / causal.sum(dim=1, keepdim=True)).expand(1, 2, 3, 4, 4)
    assert torch.allclose(attention_entropy(causal), torch.ones(1, 3))
