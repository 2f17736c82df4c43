"""Re-drawing: which parameters get new values."""

from __future__ import annotations

import torch
from torch import nn

from veriformer.properties.bench.redraw import redraw_weights


def test_frozen_parameters_are_constants_and_others_are_redrawn() -> None:
    module = nn.Linear(3, 3)
    module.bias.requires_grad_(False)
    before = module.bias.clone(), module.weight.clone()
    redraw_weights(module, 0)
    assert torch.equal(module.bias, before[0])
    assert not torch.equal(module.weight, before[1])
