"""What a run verified, in one line. Every test's report carries what it found, so that all workers are counted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

import pytest

PROFILE = os.environ.get("VERIFORMER_PROFILE", "quick")
HOLDS, DEVIATES, DOES_NOT_APPLY, LEFT = "PASS", "DEVIATION", "NOT_APPLICABLE", "left to the profile thorough"


def does_not_apply(report: pytest.TestReport) -> bool:
    """Whether a test was about a property, or faults, that do not apply to its subject."""
    return report.skipped and any(
        (name == "verified" and found[1] == DOES_NOT_APPLY) or (name == "power" and not found[1])
        for name, found in report.user_properties
    )


def verified(reports: Iterable[pytest.TestReport]) -> str:
    """Return the line that a run ends with; "" if no shipped subject was judged."""
    outcomes: Counter[str] = Counter()
    subjects: set[str] = set()
    canaries: dict[str, list[int]] = {}
    noticed = tried = 0
    for report in reports:
        for name, found in report.user_properties:
            if name == "canaries":
                canaries[found[0]] = found[1:]
            elif name == "verified" and report.when == "call":
                subjects.add(found[0])
                outcomes[found[1]] += 1
            elif name == "power" and report.when == "call":
                noticed, tried = noticed + found[0], tried + found[1]
    if not canaries:
        return ""
    judged = outcomes.total() - outcomes[DOES_NOT_APPLY] - outcomes[LEFT]
    told = [f"{outcomes[DOES_NOT_APPLY]:,} do not apply", f"{outcomes[DEVIATES]:,} known deviations"]
    told += [f"{n:,} {o}" for o, n in sorted(outcomes.items()) if o not in (HOLDS, DEVIATES, DOES_NOT_APPLY)]
    caught, sent = (sum(found[place] for found in canaries.values()) for place in (0, 1))
    return (
        f"verified in profile {PROFILE}: {outcomes[HOLDS]:,} of {judged:,} properties hold on {len(subjects)} "
        f"subjects ({', '.join(told)}), canaries {caught}/{sent}, power {noticed}/{tried}"
    )
