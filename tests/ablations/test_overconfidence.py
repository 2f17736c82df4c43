"""How sure a model is beside how often it is right."""

from __future__ import annotations

import math

import pytest
import torch

from veriformer.ablations.tasks import IGNORED
from veriformer.ablations.training.scores import calibration_error, overconfidence


def test_overconfidence_has_the_sign_that_the_calibration_error_lacks() -> None:
    sure = torch.tensor([math.log(0.9), math.log(0.1)])
    logits = sure.expand(2, 4, 2)  # both seeds are 90 % sure of class 0, four times
    labels = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])  # the one is right half of the time, the other always
    assert overconfidence(logits, labels).tolist() == pytest.approx([0.4, -0.1])
    assert calibration_error(logits, labels).tolist() == pytest.approx([0.4, 0.1])


def test_overconfidence_leaves_out_what_is_not_judged() -> None:
    logits = torch.tensor([[[5.0, 0.0], [0.0, 5.0]]])
    alone = overconfidence(logits[:, :1], torch.tensor([[0]]))
    assert torch.equal(overconfidence(logits, torch.tensor([[0, IGNORED]])), alone)
