"""Tables of a GPT-2: they start as large as the matrices of its layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from veriformer.properties.engine.case import Case

_FACTORS = (1.0, 0.5)
"""Of the matrices' deviation: 0.02, and 0.01 for positions in the released code."""


def tables_start_alike(case: Case, module: nn.Module, usual: float, deviations: float) -> None:
    """Require that each table of embeddings starts as large as matrices do, or half as large.

    Args:
        case: that judges.
        module: as it was built.
        usual: root mean square of the matrices that do not write into the stream.
        deviations: standard deviations that chance may make.
    """
    for name, part in module.named_modules():
        if not isinstance(part, nn.Embedding):
            continue
        root = case.apply(root_mean_square, part.weight)
        slack = deviations / math.sqrt(2 * part.weight.numel()) + 0.1  # and what the matrices themselves err by
        near = ((root / (usual * factor) - 1).abs() <= slack for factor in _FACTORS)
        case.require(
            torch.stack([*near]).any(),
            f"{name}.weight starts {float(root) / usual:.3g} times as large as the matrices of the layers",
            got=f"a deviation of {float(root):.3g}",
            expected=f"{usual:.3g}, or half of it",
            cause=lambda name=name: f"{name}.weight is left out where the weights are initialised",  # type: ignore[misc]
        )


def root_mean_square(table: Tensor) -> Tensor:
    """Return the root of the mean square of a table, without rows of zeros, which are those of padding."""
    rows = table.detach().double()
    return rows[rows.any(1)].square().mean().sqrt()
