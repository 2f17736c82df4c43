"""Studies that train nothing: something is measured at points, and laws are fitted to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Point = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One study by measurement.

    Attributes:
        name: as the command line knows it.
        question: that it answers.
        source: where the question comes from.
        count: how many points there are, from the device.
        points: measures them one by one, from the device and the number of seeds.
        conclude: what is made of the points: fits, and sentences.
    """

    name: str
    question: str
    source: str
    count: Callable[[str], int]
    points: Callable[[str, int], Iterator[Point]]
    conclude: Callable[[list[Point]], dict[str, Any]]


MEASUREMENTS: dict[str, Measurement] = {}
"""Every measurement by its name."""


def register(*measurements: Measurement) -> None:
    """Make measurements known by their names."""
    MEASUREMENTS.update({m.name: m for m in measurements})
