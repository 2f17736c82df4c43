"""Learned positions: a table, one row a position, and an end."""

from __future__ import annotations

import torch
from torch import nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_fact, needs_module
from veriformer.properties.engine.property import holds


@holds(
    "learned.table",
    statement="Row t of a table of max_len * d parameters is used at position t, and the table has an end.",
    formula="d f(T)_t / d table_s = I if s = t else 0; f(max_len + 1) raises",
    source="Course notes, section 3.3.",
    kinds=("positions",),
    level="extended",
    unless=(needs_fact("positions", "learned"), needs_module),
    examples_factor=0.5,
    catches=("PE10", "EM07"),
)
def each_position_has_its_row(case: Case) -> None:
    """The gradient of output t with respect to the table is one-hot in the row. A declared position_offset shifts the
    rows (BART and OPT start at 2). Beyond the table an error must come, not a wrapped or clamped row.
    """
    built = case.built(fresh=True)
    if not isinstance(built.module, nn.Module):
        case.reject("no module")
    offset = int(case.subject.fact("position_offset", 0))
    max_len = int(case.subject.fact("max_len", built.config.max_len))
    length = case.integer("T", 1, max_len)
    parameters = [p for p in built.module.parameters() if p.ndim == 2]
    case.require(
        len(parameters) == 1, "there is not one table of parameters", got=f"{len(parameters)} matrices", expected="1"
    )
    table = parameters[0]
    case.require(
        table.shape[0] == max_len + offset,
        "the table does not have max_len rows",
        got=f"{table.shape[0]} rows",
        expected=f"{max_len + offset}",
    )
    output = case.call(built, length)
    at = case.integer("t", 0, length - 1)
    (gradient,) = torch.autograd.grad(output[at].sum(), table)
    rows = gradient.abs().sum(dim=1).nonzero().flatten().tolist()
    case.require(
        rows == [at + offset],
        f"position {at} does not use row {at + offset} of the table alone",
        got=f"rows {rows}",
        expected=f"row {at + offset}",
        cause=lambda: f"position {at} reads row {rows[0]}: an offset of {rows[0] - at}" if len(rows) == 1 else None,
    )
    if case.subject.fact("beyond_max_len") != "works":
        try:
            case.call(built, max_len + 1)
        except SubjectError:
            case.witness()
            return
        case.require(
            False, f"position {max_len}, beyond the table, raises no error", got="an output", expected="an error"
        )
    case.witness()
