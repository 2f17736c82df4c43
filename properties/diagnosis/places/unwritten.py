"""Rows of a softmax that no call writes: by the number of rows, whatever stands in them."""

from __future__ import annotations

import torch

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation
from veriformer.properties.formulas.numbers import which

_MOST = 40
_WIDTH = 5


def unwritten_opinion(case: Case, problem: Violation) -> str | None:
    """Say for which numbers of rows a softmax is wrong in its last rows alone, and how many of them there are.

    Args:
        case: of the failure.
        problem: the violation; what is measured does not depend on it.
    """
    built = case.bench.pool.get(case.config(), torch.float32)
    generator, wrong, empty = torch.Generator().manual_seed(3), dict[int, int](), True
    for rows in range(1, _MOST + 1):
        scores = torch.randn(rows, _WIDTH, generator=generator).to(case.bench.device)
        try:
            got = case.call(built, scores, -1) if case.subject.accepts("dim") else case.call(built, scores)
        except SubjectError:
            return None
        off = ~((got.double() - scores.double().softmax(-1)).abs() < 1e-3).all(-1)
        if not bool(off.any()):
            continue
        first = int(off.nonzero().min())
        if not bool(off[first:].all()):
            return None  # what is wrong is in all rows, or in some
        wrong[rows] = rows - first
        empty = empty and not bool(got[first:].any())
    if not wrong or len(wrong) == _MOST:
        return None
    what = "are 0: they are never written" if empty else "are wrong"
    for block in range(2, _MOST // 2):
        if all(wrong.get(rows, 0) == rows % block for rows in range(block, _MOST + 1)):
            return (
                f"the last rows {what}, as many as are left where the number of rows is divided by {block}: a last "
                f"block of {block} rows that is not full is left out"
            )
    return f"with {which(list(wrong), range(1, _MOST + 1))} rows the last ones {what}, else all are right"
