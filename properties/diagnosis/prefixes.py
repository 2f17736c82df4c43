"""Why the outputs for a prefix are other ones where no later input reaches them: the number of inputs does."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.causes.asking import answer_to
from veriformer.properties.causes.replacing import Within, line_that_parts
from veriformer.properties.causes.tracing.lines import told
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.diagnosis.distances import counted_from_the_end
from veriformer.properties.diagnosis.masks.inside import hidden_from_some
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream
from veriformer.properties.subject.paths import Path


def length_enters(case: Case, stream: Stream, x: Tensor, cut: int, path: Path) -> str | None:
    """No later input reaches an output: tell from which length on the length itself does, and where it enters."""
    if hidden := answer_to(lambda: hidden_from_some(case)):
        return hidden
    first = stream(x[:, :cut], path=path)
    other = torch.cat([x[:, :cut], stream.other(x)[:, cut:]], dim=1)
    before, after = stream(x, path=path)[:, :cut], stream(other, path=path)[:, :cut]
    if worst_difference(after, before, size_of(before)).error > case.tolerance(stream.built):
        long = x.shape[1]
        return f"later inputs reach them in sequences of {long}, not in short ones"
    for total in range(cut + 1, x.shape[1] + 1):
        got = stream(x[:, :total], path=path)[:, :cut]
        if worst_difference(got, first, size_of(first)).error > case.tolerance(stream.built):
            if ends := answer_to(lambda: counted_from_the_end(stream, path)):
                return f"no later input reaches them; their number does: {ends}"
            where = answer_to(lambda total=total: _line_of_length(case, stream, x, cut, total, path))  # type: ignore[misc]
            return (
                f"no later input reaches them; their number does, from {total} on{where or ''} "
                f"(declare max_len={total - 1} if that is meant)"
            )
    return None


def _line_of_length(case: Case, stream: Stream, x: Tensor, cut: int, total: int, path: Path) -> str | None:
    """Return the line whose numbers for the first inputs are other ones where more follow, as the end of a sentence."""
    short, long = (lambda n=n: lambda: stream(x[:, :n], path=path) for n in (cut, total))

    def agrees(one: Tensor, other: Tensor) -> bool:
        return worst_difference(one[:, :cut], other[:, :cut], size_of(other)).error <= case.tolerance(stream.built)

    found = line_that_parts(short, long, Within(cut, total, 0), agrees, case.tolerance(stream.built))
    return f", at {told(found.long)}" if found and told(found.long) else None
