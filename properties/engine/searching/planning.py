"""What is planned for a large instance, and about how long it will take: told before anything is judged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import parameters_of
from veriformer.properties.bench.profiles import CALLS
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.engine.property import FARTHEST, Property
from veriformer.properties.engine.searching.costs import effort_of, seconds_of, time_of_forward
from veriformer.properties.engine.searching.reaching import planned_lengths

_FAR_CALLS = 2.5  # at a far length: two calls, and now and then another path
_BESIDE = 150  # short calls besides: probes, rounding noise in each dtype, faults


@dataclass(frozen=True)
class Plan:
    """What is done with a large instance.

    Attributes:
        told: in words, the same wherever it is planned.
        name: of the subject.
        forward_seconds: measured, of one forward on a few tokens.
        seconds: that the run takes, estimated.
        property_seconds: after which one property stops.
    """

    told: str
    name: str
    forward_seconds: float
    seconds: float
    property_seconds: float

    @property
    def sentence(self) -> str:
        """All of it, with its times."""
        return (
            f"{self.name}: {self.told}; one forward of a few tokens takes {self.forward_seconds:.2g} s here, "
            f"all of it about {_duration(self.seconds)}"
        )


def plan_of(bench: Workbench, properties: Iterable[Property]) -> Plan | None:
    """Return what is planned for the properties of a run; None where nothing need be: a subject that is not large.

    Raises:
        SubjectError: it cannot be called.
    """
    if not bench.pool.is_large:
        return None
    effort, short = effort_of(bench), time_of_forward(bench).seconds
    if not short:
        raise SubjectError(f"a {bench.subject.kind} has no ordinary inputs that a forward could be timed on")
    far = planned_lengths(bench, FARTHEST)
    seconds = _BESIDE * short + sum(seconds_of(bench, n) for n in far[:1])
    for prop in properties:
        if prop.why_not(bench.subject) is not None or prop.costly:
            continue
        seconds += CALLS * short * max(1, round(effort.examples * prop.examples_factor))
        lengths = (
            planned_lengths(bench, prop.farthest, steps=prop.steps) if prop.farthest and not prop.goes_wide else []
        )
        seconds += _FAR_CALLS * sum(seconds_of(bench, n) for n in (lengths if prop.sweeps_lengths else lengths[:1]))
    samples = f", and one sample each of {' '.join(map(str, reversed(far)))}" if far else ""
    told = (
        f"{parameters_of(bench.subject.module) / 1e6:.1f} million parameters: {effort.examples} cases a property, of "
        f"sequences to {effort.tokens}{samples}; float64 where float32 cannot tell, half precision where a "
        "property is about it"
    )
    return Plan(told, bench.subject.name, short, seconds, effort.property_seconds)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
