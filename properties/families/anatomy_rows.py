"""Learned rows far out inside a whole model; part of `anatomy.positions`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.entering import first_rows, position_steps
from veriformer.properties.anatomy.flow import LENGTH, Flow
from veriformer.properties.anatomy.traced import Traced
from veriformer.properties.engine.case import Case


def far_rows_follow(case: Case, flowing: Flow, seen: Traced) -> None:
    """Require that the rows of a learned table go on as they begin, to the last position of a long sequence.

    Args:
        case: of many positions.
        flowing: its forward.
        seen: the trace of a forward on one token at every position.
    """
    wrong = case.apply(first_wrong_row, seen, flowing.module, flowing.length, flowing.width)
    at = int(wrong)
    if at == _UNKNOWN:
        case.does_not_apply("no sum was seen by which rows of a table of positions enter")
    case.subject.fact("positions")  # what is asked for counts as verified
    case.witness()
    case.require(
        wrong == flowing.length,
        f"position {at} takes another row of the table of positions than the one behind that of {at - 1}",
        got=f"rows that follow one another up to position {at - 1}",
        expected=f"rows that follow one another up to position {flowing.length - 1}",
    )


_UNKNOWN = 0


def first_wrong_row(seen: Traced, module: nn.Module, length: int, width: int) -> Tensor:
    """Return the first position that takes another row than its table has there; T if none does, 0 if none is known.

    Args:
        seen: the trace of a forward on one token at every position.
        module: the model.
        length: T.
        width: D.
    """
    tables = {n: p.detach().cpu().double().reshape(-1, width) for n, p in module.named_parameters()
              if p.shape[-1] == width}  # fmt: skip
    reached = [_UNKNOWN]
    for steps in position_steps(seen, length, width):
        for first, name in first_rows(seen, module, length, width, told=min(LENGTH, length)):
            rows = tables[name][first : first + length]
            off = (rows - rows[:1] - steps[: len(rows)]).abs().amax(-1) > seen.limit * float(tables[name].abs().amax())
            bad = [int(n) for n in off.nonzero().flatten()] or [len(rows)]
            reached.append(bad[0] if bad[0] >= min(LENGTH, length) else _UNKNOWN)
    return torch.tensor(max(reached))
