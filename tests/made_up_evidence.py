"""Evidence that is made up, to see verdicts change with it."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from veriformer.ablations.studies.study import Study
from veriformer.claims.evidence import Evidence
from veriformer.claims.trained import Row

OUTCOMES: Mapping[str, tuple[float, ...]] = {
    "accuracy": (0.25, 0.5, 0.97, 1.0),
    "loss": (2.5, 3.0, 5.0),
    "overconfidence": (-0.1, 0.0, 0.1, 0.2),
    "max_loss": (1.0, 100.0),
    "spikes": (0, 3),
}
"""What a seed may come to, far enough apart that every limit has some on either side; losses above the entropy."""


@dataclass
class MadeUp(Evidence):
    """Evidence of which the trained part is drawn at random, a row at a time, instead of trained.

    Attributes:
        world: seed of what is drawn.
    """

    quick: bool = True
    world: int = field(default=0, kw_only=True)

    def trained(self, study: Study, seeds: range | None = None) -> dict[tuple[str, str, str], Row]:
        return {
            (task, setting.name, variant.name): Row(
                task,
                self._records(
                    f"{self.world} {study.name} {task} {setting.name} {variant.name}", study, len(seeds or range(5))
                ),
            )
            for task, setting, variant in study.rows()
        }

    def _records(self, name: str, study: Study, number: int) -> list[dict[str, Any]]:
        draw = random.Random(name)
        all_seeds = {what: draw.choice(values) for what, values in OUTCOMES.items()}
        elsewhere = {str(length): draw.choice(OUTCOMES["accuracy"]) for length in study.lengths}
        start, end = ([[draw.choice((0.3, 0.6, 0.99))] * 4 for _ in range(4)] for _ in range(2))
        return [
            {
                **{what: value + draw.uniform(0, 1e-3) for what, value in all_seeds.items()},
                "spikes": all_seeds["spikes"],
                "lengths": {length: value + draw.uniform(0, 1e-3) for length, value in elsewhere.items()},
                "curves": {"entropy": [_moved(start, draw), _moved(end, draw)]},
            }
            for _ in range(number)
        ]


def _moved(layers: list[list[float]], draw: random.Random) -> list[list[float]]:
    return [[value + draw.uniform(0, 1e-3) for value in heads] for heads in layers]


@dataclass
class Running:
    """What Python code ran inside `with`.

    Attributes:
        codes: of functions that were called.
    """

    codes: set[CodeType] = field(default_factory=set)

    def __enter__(self) -> Running:
        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                self.codes.add(frame.f_code)

        self._before = sys.getprofile()
        sys.setprofile(note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)


def codes_of(thing: Any) -> set[CodeType]:
    """Return the code of a function, of a class's methods, or of all that a table holds."""
    if isinstance(thing, Mapping):
        return set().union(*(codes_of(value) for value in thing.values()))
    if isinstance(thing, type):
        return {f.__code__ for f in vars(thing).values() if hasattr(f, "__code__")}
    return {thing.__code__}
