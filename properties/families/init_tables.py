"""Tables of a GPT-2: they start as large as the matrices of its layers."""

from __future__ import annotations

import math

from torch import nn

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
        rows = part.weight.detach().double()
        rows = rows[rows.any(1)]  # a padding row of zeros
        share = rows.square().mean().sqrt() / usual
        slack = deviations / math.sqrt(2 * max(rows.numel(), 1)) + 0.1  # and what the matrices themselves err by
        case.require(
            min(abs(float(share) / factor - 1) for factor in _FACTORS) <= slack,
            f"{name}.weight starts {float(share):.3g} times as large as the matrices of the layers",
            got=f"a deviation of {float(rows.square().mean().sqrt()):.3g}",
            expected=f"{usual:.3g}, or half of it",
            cause=lambda name=name: f"{name}.weight is left out where the weights are initialised",  # type: ignore[misc]
        )
