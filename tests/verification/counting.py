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
    found = dict(report.user_properties)
    outcome, tried = found.get("verified", ("", ""))[1], found.get("power", (0, 1))[1]
    return report.skipped and (outcome == DOES_NOT_APPLY or not tried)


def verified(reports: Iterable[pytest.TestReport]) -> str:
    """Return the line that a run ends with; "" if no shipped subject was judged."""
    outcomes: Counter[str] = Counter()
    subjects: set[str] = set()
    canaries: dict[str, list[int]] = {}
    noticed = tried = 0
    for report in reports:
        found = dict(report.user_properties)
        if "canaries" in found:
            kind, *counts = found["canaries"]
            canaries[kind] = min(counts, canaries.get(kind, counts))  # of all workers the one that missed most
        if "verified" in found and report.when == "call":
            target, outcome = found["verified"]
            subjects.add(target)
            outcomes[outcome] += 1
        elif "power" in found and report.when == "call":
            noticed, tried = noticed + found["power"][0], tried + found["power"][1]
        elif "canaries" in found and report.failed:
            outcomes["not judged"] += 1
    if not canaries:
        return ""
    judged = outcomes.total() - outcomes[DOES_NOT_APPLY] - outcomes[LEFT]
    told = [f"{outcomes[DOES_NOT_APPLY]:,} do not apply", f"{outcomes[DEVIATES]:,} known deviations"]
    told += [f"{n:,} {o}" for o, n in sorted(outcomes.items()) if o not in (HOLDS, DEVIATES, DOES_NOT_APPLY)]
    caught, sent = (sum(found[place] for found in canaries.values()) for place in (0, 1))
    return (
        f"verified in profile {PROFILE}: {outcomes[HOLDS]:,} of {judged:,} properties hold on {len(subjects)} "
        f"subjects ({', '.join(told)}), canaries {caught}/{sent}{f', power {noticed}/{tried}' if tried else ''}"
    )
