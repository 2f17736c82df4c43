"""The systems that claims are tested beside, on cases small enough to work out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from veriformer.claims.systems import wordpieces
from veriformer.claims.systems.associative import energy, retrieved, update
from veriformer.claims.systems.convolutions import convolution, kernel_attention, long_convolution, non_local
from veriformer.claims.systems.initialisations import orthogonal
from veriformer.claims.systems.positions import one_hot, resolution, scalar


def test_a_convolution_adds_what_stands_beside() -> None:
    x = torch.tensor([[1.0], [10.0], [100.0]])
    kernel = torch.tensor([[[2.0]], [[3.0]], [[5.0]]])  # offsets -1, 0, 1: W_o meets x_{i - o}
    assert convolution(x, kernel).flatten().tolist() == [3 + 20, 5 + 30 + 200, 50 + 300]


def test_a_long_convolution_reaches_everywhere_and_knows_offsets_alone() -> None:
    x = torch.tensor([[1.0], [10.0], [100.0]])
    found = long_convolution(x, lambda offsets: offsets[..., None, None])
    assert found.flatten().tolist() == [-10 - 200, 1 - 100, 2 + 10]


def test_a_non_local_model_weighs_by_content() -> None:
    x = torch.tensor([[1.0], [2.0]])
    assert non_local(x, lambda a, b: (a * b)[None]).flatten().tolist() == [1 + 2 * 2, 2 + 4 * 2]


def test_kernel_attention_is_a_sum_that_is_not_divided() -> None:
    x, one = torch.tensor([[0.0], [1.0]]), torch.ones(1, 1)
    assert kernel_attention(x, one, one, one).flatten().tolist() == pytest.approx([1.0, math.e])


def test_an_update_falls_onto_the_pattern_that_is_near_and_lowers_the_energy() -> None:
    patterns, state = torch.eye(3) * 4, torch.tensor([3.0, 1.0, 0.0])
    after = update(patterns, state, 2.0)
    assert torch.allclose(after, patterns[0], atol=1e-4)
    assert energy(patterns, after, 2.0) < energy(patterns, state, 2.0)
    assert retrieved(patterns, 0.0, 2.0, torch.Generator().manual_seed(0)) == 1.0
    assert retrieved(patterns, 0.0, 1e-3, torch.Generator().manual_seed(0)) == 0.0, "all blend at a high temperature"


def test_naive_positions_are_crowded_or_wide() -> None:
    assert resolution(scalar(100, 4)) == pytest.approx(1 / 99)
    assert resolution(one_hot(100)) == pytest.approx(2**0.5)
    assert one_hot(100).shape == (100, 100)


def test_orthogonal_weights_keep_lengths_and_leave_biases() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 9))
    biases = [module.bias.clone() for module in model]
    orthogonal(model, torch.Generator().manual_seed(0))
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    for module, bias in zip(model, biases, strict=True):
        assert torch.allclose((x @ module.weight.T).norm(dim=1), x.norm(dim=1), rtol=1e-5)
        assert torch.equal(module.bias, bias)


@pytest.mark.parametrize(
    ("score", "first"),
    [("whole corpus", ("a", "b")), ("each", ("x", "y")), ("notes", ("a", "c"))],
)
def test_scores_of_pairs_pick_different_merges(score: str, first: tuple[str, str]) -> None:
    words = ["ab"] * 20 + ["ac", "bc"] + ["xy"]
    assert wordpieces.merges(words, 1, wordpieces.SCORES[score]) == [first]


def test_the_likelihood_is_that_of_symbols_drawn_one_by_one() -> None:
    assert wordpieces.likelihood(["ab", "ab"]) == pytest.approx(4 * math.log(1 / 2))
    assert wordpieces.likelihood(["ab", "ab"], ("a", "b")) == 0.0


def test_merging_ends_where_no_pair_is_left() -> None:
    assert wordpieces.merges(["ab"], 5, wordpieces.each) == [("a", "b")]
