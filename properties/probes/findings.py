"""What a probe finds out about a subject, and where it starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RandomDraws
from veriformer.properties.engine.stream import Stream


@dataclass(frozen=True)
class Question:
    """What a probe saw that may be a defect or the design.

    Attributes:
        decides: id of the property that the answer decides about.
        text: one sentence, ending in a question mark.
        declare: the line that answers it, if it is by design.
    """

    decides: str
    text: str
    declare: str


@dataclass(frozen=True)
class Finding:
    """One thing that was seen.

    Attributes:
        name: of the fact, or of what is no fact to declare ("deterministic").
        value: what it is.
        how: how that was seen; one clause.
        is_fact: whether it stands in for a declaration: properties that follow from it are judged.
        told: whether a report of a check mentions it where it is not declared.
        asks: the question that it raises where it is not declared, if it narrows what is judged.
    """

    name: str
    value: Any
    how: str
    is_fact: bool = True
    told: bool = True
    asks: Question | None = None

    @property
    def note(self) -> str:
        """The finding as a sentence of a report."""
        return f"{self.name} = {self.value!r}: {self.how}" + (
            "; declare it" if self.is_fact and "declare" not in self.how else ""
        )


Probe = Callable[[Workbench], Iterator[Finding]]


def a_case(bench: Workbench) -> Case:
    """Return a case of the smallest model in the widest dtype that it computes in."""
    name = str(judged_dtypes(bench)[-1]).removeprefix("torch.")
    return Case(bench, RandomDraws(0, {"config": 0, "dtype": name}))


def a_stream(bench: Workbench, side: str = "target") -> Stream:
    """Return the smallest model as a map from a sequence to its outputs."""
    case = a_case(bench)
    return Stream(case, case.built(dtype=judged_dtypes(bench)[-1]), side=side)
