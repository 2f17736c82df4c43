"""Learned positions: a table, one row a position, and an end."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.calling import refuses
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
    count = case.apply(num_matrices, built.module)
    case.equal(count, 1, "there is not one table of parameters", got=f"{count} matrices", expected="1")
    table = parameters[0]
    rows = case.apply(num_rows, table)
    case.equal(rows, max_len + offset, "the table does not have max_len rows", got=f"{rows} rows")
    output = case.call(built, length)
    at = case.integer("t", 0, length - 1)
    (gradient,) = torch.autograd.grad(output[at].sum(), table)
    rows = gradient.abs().sum(dim=1).nonzero().flatten().tolist()
    case.equal(
        rows,
        [at + offset],
        f"position {at} does not use row {at + offset} of the table alone",
        got=f"rows {rows}",
        expected=f"row {at + offset}",
        cause=lambda: _row_that_is_read(built.module, table, output, at, offset, rows),
    )
    if case.subject.fact("beyond_max_len") != "works":
        with case.bench.trying(built) as tried:
            _runs_there(case, tried, max_len)
            case.require(
                case.apply(refuses, case.caller(tried, max_len + 1)),
                f"position {max_len}, beyond the table, raises no error",
                got="an output",
                expected="an error",
            )
    case.witness()


def _runs_there(case: Case, tried: Built, length: int) -> None:
    try:
        case.call(tried, length)
    except SubjectError:
        case.does_not_apply("it runs on the GPU alone, where an index beyond a table ends the process")


def _row_that_is_read(
    module: nn.Module, table: Tensor, output: Tensor, at: int, offset: int, rows: list[int]
) -> str | None:
    """Find the rows that outputs are, by their values: a row for padding has no gradient."""
    same = (output.detach()[:, None] == table.detach()[None]).all(-1)
    found = [row.nonzero().flatten().tolist() for row in same]
    if not rows and all(len(row) == 1 for row in found):
        read = [row[0] for row in found]
        padding = {m.padding_idx for m in module.modules() if isinstance(m, nn.Embedding)} - {None}
        is_padding = (
            f", the row of padding (padding_idx={read[at]}), which is never trained" if read[at] in padding else ""
        )
        told = f"position {at} reads row {read[at]}{is_padding}"
        if {row - t for t, row in enumerate(read)} == {read[0]}:
            return f"{told}: positions begin at row {read[0]} of the table instead of row {offset}"
        return told
    if len(rows) == 1:
        told = f"position {at} reads row {rows[0]}"
        read = [row[0] if row else -1 for row in found]
        if {row - t for t, row in enumerate(read)} == {read[0]}:
            return f"{told}: positions begin at row {read[0]} of the table instead of row {offset}"
        if read == sorted(read, reverse=True) and len(read) > 1:
            return f"{told}: the rows are read in reverse, position 0 reads row {read[0]}"
        if len(set(read)) == 1 and len(read) > 1:
            return f"every position reads row {rows[0]}"
        return f"{told}: an offset of {rows[0] - at}"
    if not rows:
        return f"position {at} does not depend on the table: it is detached, or never read"
    return f"position {at} depends on rows {', '.join(map(str, rows[:6]))} at once"


def num_matrices(module: nn.Module) -> int:
    """Return how many of the parameters have two axes."""
    return sum(p.ndim == 2 for p in module.parameters())


def num_rows(table: Tensor) -> int:
    """Return the rows of a table."""
    return len(table)
