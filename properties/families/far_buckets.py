"""T5's buckets of far distances; part of `positions.far`."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.case import Case
from veriformer.properties.families.positions_asked import asked
from veriformer.properties.formulas.relative_biases import where_buckets_begin
from veriformer.reference.position_bias import t5_bucket


def settled(case: Case, relative: Tensor) -> Tensor:
    """Return where a distance is not at the very end of its bucket: a logarithm of float32 may go either way there."""
    both = bool(case.subject.fact("bidirectional"))
    buckets = int(case.subject.fact("num_buckets", 32)) // (2 if both else 1)
    exact, farthest = buckets // 2, int(case.subject.fact("max_distance", 128))
    steps = (relative.abs().clamp(min=1).double() / exact).log() / torch.tensor(farthest / exact).double().log()
    steps = steps * (buckets - exact)
    return (relative.abs() < exact) | ((steps - steps.round()).abs() > 1e-4)


def buckets_begin_as_published(case: Case, built: Built | None, length: int) -> None:
    """Require that far keys share a bias exactly where they share a bucket, in the last row and in the first."""
    bias = asked(case, built, length, length)
    if bias is None or bias.ndim != 3 or bias.shape[1:] != (length, length):
        return
    for at in (length - 1, 0):
        relative = torch.arange(length) - at
        bucket = t5_bucket(
            relative,
            bidirectional=bool(case.subject.fact("bidirectional")),
            num_buckets=int(case.subject.fact("num_buckets", 32)),
            max_distance=int(case.subject.fact("max_distance", 128)),
        )
        kept = settled(case, relative)
        column, own = bias[:, at, kept].double(), bucket[kept]
        apart = (column[:, :, None] != column[:, None, :]).any(dim=0) != (own[:, None] != own[None, :])
        said = [int(relative[kept][i]) for i in apart.nonzero()[0]] if bool(apart.any()) else []
        case.require(
            ~apart.any(),
            f"of {length} positions, distances do not share their biases as published",
            got=f"distances {' and '.join(map(str, said))}",
            expected="one bias where there is one bucket, and another elsewhere",
            cause=lambda at=at, bucket=bucket: where_buckets_begin(bias.double(), bucket) if at else None,  # type: ignore[misc]
        )
    case.witness()
