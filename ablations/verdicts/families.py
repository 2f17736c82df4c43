"""Which tests belong together: one family for one claim, whatever part of it is run."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from veriformer.ablations.studies.study import STUDIES, Setting, Study, Variant

TESTS = 3
"""Of a comparison: accuracy, loss area, dead seeds."""


@dataclass(frozen=True)
class Families:
    """Families of tests, one a study.

    A comparison that several studies make belongs to the first of them in the order of `STUDIES`, so that the same
    trials are corrected in one way only.

    Attributes:
        owner: study of each comparison.
        sizes: tests in the family of each study, those of a filtered run that were left out included.
    """

    owner: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(studies: Iterable[Study]) -> Families:
        """Return the families of all that is registered and of these studies, each taken whole."""
        known = {study.name: study for study in STUDIES.values()}
        known |= {study.name: study.whole or study for study in studies}
        owner: dict[str, str] = {}
        for study in known.values():
            for task, setting, variant in _tested(study):
                owner.setdefault(claim_of(study, task, setting, variant), study.name)
        return Families(owner, {name: TESTS * count for name, count in Counter(owner.values()).items()})


def _tested(study: Study) -> Iterator[tuple[str, Setting, Variant]]:
    """Yield the rows that are compared with their base and not settled by a theorem."""
    for task, setting, variant in study.rows():
        if variant is not study.variants[0] and not study.is_forced(task, setting, variant):
            yield task, setting, variant


def number_of_tests(study: Study) -> int:
    """Return how many tests a whole study makes at most; other studies may own some of them."""
    return TESTS * sum(1 for _ in _tested(study.whole or study))


def claim_of(study: Study, task: str, setting: Setting, variant: Variant) -> str:
    """Return what identifies a comparison: the trials of both sides, but for seed, device and what is looked at."""
    sides: Sequence[str] = [
        json.dumps(
            {**study.trial(task, setting, side, 0).to_json(), "lengths": (), "checks": (), "device": ""},
            sort_keys=True, default=repr,
        )
        for side in (study.variants[0], variant)
    ]  # fmt: skip
    return hashlib.sha256("\n".join(sorted(sides)).encode()).hexdigest()
