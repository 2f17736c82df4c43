"""Readers of the left and of both sides, what they are asked in training, and heads that are silenced."""

from __future__ import annotations

import pytest
import torch

from veriformer.ablations.studies import STUDIES
from veriformer.ablations.tasks import IGNORED, TASKS
from veriformer.ablations.tasks.masked import MASK
from veriformer.ablations.training.heads import costs_of_heads
from veriformer.ablations.training.loop import train
from veriformer.ablations.training.observation import part_of
from veriformer.ablations.training.samples import shared, training_data
from veriformer.ablations.training.scores import logits_of, loss_and_accuracy
from veriformer.ablations.training.stacking import Stack, build_one
from veriformer.ablations.trials.models import reader_model
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.trials.trial import Trial

SIZE = {"num_layers": 2, "d_model": 12, "num_heads": 3, "positions": "learned", "vocab_size": 17, "max_len": 16}


def _depends(reads: str) -> torch.Tensor:
    """Return which inputs (columns) the logits of each place (rows) depend on."""
    model = reader_model({**SIZE, "reads": reads}, 0)
    x = torch.randint(16, (1, 6), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(6, 6, dtype=torch.bool)
    for column in range(6):
        other = x.clone()
        other[0, column] = (x[0, column] + 1) % 16
        seen[:, column] = (model(x) != model(other)).any(dim=-1)[0]
    return seen


def test_a_reader_of_the_left_sees_what_stands_before_alone() -> None:
    assert torch.equal(_depends("left"), torch.ones(6, 6, dtype=torch.bool).tril(-1))


def test_a_reader_of_both_sides_sees_everything() -> None:
    assert _depends("both").all()


def test_readers_share_their_weights() -> None:
    one, two = (reader_model({**SIZE, "reads": reads}, 5).state_dict() for reads in ("left", "both"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert {part_of(name) for name in one} == {"embedding", "layer 1", "layer 2", "output"}


def test_a_reader_of_the_right_is_refused() -> None:
    with pytest.raises(ValueError, match="reads was 'right'; it must be left or both"):
        reader_model({**SIZE, "reads": "right"}, 0)


def test_next_asks_for_every_token_but_the_first() -> None:
    recipe = Recipe(steps=2, batch_size=8, objective="next")
    asked, plain = (training_data(TASKS["infill"], r, 3) for r in (recipe, Recipe(steps=2, batch_size=8)))
    tokens = asked.inputs[0]
    assert torch.equal(asked.labels[:, 1:], tokens[:, 1:])
    assert (asked.labels[:, 0] == IGNORED).all()
    assert (tokens != MASK).all()
    shown = plain.inputs[0] != MASK
    assert torch.equal(tokens[shown], plain.inputs[0][shown])


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_masked_asks_for_what_is_hidden_and_hides_one_at_least(share: float) -> None:
    data = training_data(TASKS["infill"], Recipe(steps=50, batch_size=8, objective="masked", mask_share=share), 3)
    hidden = data.inputs[0] == MASK
    assert torch.equal(hidden, data.labels != IGNORED)
    assert hidden.any(dim=1).all()
    # four standard errors of 400 x 16 draws; a share of nothing hides the one
    assert float(hidden.double().mean()) == pytest.approx(share or 1 / 16, abs=4 * (0.24 / 6400) ** 0.5)


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(ValueError, match="objective was 'previous'; it must be one of task, next, masked"):
        Recipe(objective="previous")


def _stack(seeds: int = 2) -> Stack:
    config = {"architecture": "classifier", "vocab_size": 8, "max_len": 8, "d_model": 12, "num_heads": 3,
              "num_layers": 2, "positions": "learned"}  # fmt: skip
    stack = Stack([Trial(task="precede", config=config, seed=seed) for seed in range(seeds)])
    stack.train(False)
    return stack


def test_what_a_head_is_worth_is_what_is_lost_without_it() -> None:
    stack = _stack()
    samples = shared(TASKS["precede"].draw(0, 64), 2, torch.device("cpu"))
    before = {name: p.clone() for name, p in stack.parameters.items()}
    costs = costs_of_heads(stack, samples)
    assert all(torch.equal(before[name], p) for name, p in stack.parameters.items())
    with torch.no_grad():
        whole = loss_and_accuracy(logits_of(stack, samples), samples.labels)[0]
        # the second head of the second layer, d_k = 4
        stack.parameters["stack.layers.1.attention.o_proj.weight"][..., 4:8] = 0
        without = loss_and_accuracy(logits_of(stack, samples), samples.labels)[0]
    found = torch.tensor(costs["loss"])
    assert found.shape == (2, 2, 3)
    assert torch.allclose(found[:, 1, 1], without - whole, atol=1e-6)
    assert (found.abs() > 0).all()


def test_heads_are_recorded_where_asked() -> None:
    (record,) = train([Trial(task="precede", config=_stack(1).trials[0].config, recipe=Recipe(steps=1), heads=True)])
    assert [len(layer) for layer in record["heads"]["accuracy"]] == [3, 3]
    assert STUDIES["entropy"].heads


def test_an_open_stack_has_no_closing_norm() -> None:
    study = STUDIES["closing-norm"]
    task, setting, _ = next(study.rows())
    closed, opened = (build_one(study.trial(task, setting, v, 0)) for v in study.variants)
    names = {n for n, _ in closed.named_parameters()} - {n for n, _ in opened.named_parameters()}
    assert names == {"stack.final_norm.weight", "stack.final_norm.bias"}


def test_views_have_a_theorem_that_forces_no_accuracy() -> None:
    study = STUDIES["views"]
    for task, setting, variant in study.rows():
        assert study.trial(task, setting, variant, 0).checks == ("permutation",)
        assert not study.is_forced(task, setting, variant)
