"""A classifier's own loss: of its classes, however few the samples are, right and wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties import Subject, check


class Classifier(nn.Module):
    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocab_size, d_model), nn.Linear(d_model, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.tokens(tokens)).mean(1))
        return out


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "PASS"), (2.0, "OPEN")], ids=["right", "doubled"])
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_of_a_classifier_is_held_to_its_classes(factor: float, outcome: str, seed: int) -> None:
    mine = Subject(
        kind="classifier", build=lambda c: Classifier(c.vocab_size, c.d_model), forward=lambda m, x: m(x),
        loss=lambda m, x, y: factor * functional.cross_entropy(m(x), y), declares={"positions": "none"},
    )  # fmt: skip
    (result,) = check(mine, only=["loss.of-model"], profile="quick", seed=seed).results
    assert result.outcome == outcome, result.reason
