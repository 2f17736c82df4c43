"""A finding: a number that was measured, and where it would have to lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

ROLES = ("written", "restricted", "corrected")
"""What a finding speaks for: the statement as it is written, the statement under its condition, or the statement that
is put in its place."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One measured number of a claim and the interval that it must lie in.

    Attributes:
        says: what was measured, in words.
        role: one of `ROLES`.
        low: least value that the measurement allows; for an exact number the number itself.
        high: largest value that the measurement allows; for a statistical one the other end of its 95 % interval.
        least: smallest value under which what it speaks for is true; -inf: no such limit.
        most: largest value under which it is true; inf: no such limit.
        how: "measured", or the properties or the study that gave it.
    """

    says: str
    role: str
    low: float
    high: float
    least: float = -math.inf
    most: float = math.inf
    how: str = "measured"

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"a finding speaks for {self.role!r}; it must be one of {', '.join(ROLES)}")
        if not self.least <= self.most:
            raise ValueError(f"{self.says!r} must lie in [{self.least}, {self.most}], which holds nothing")
        if math.isinf(self.least) and math.isinf(self.most):
            raise ValueError(f"{self.says!r} could not come out otherwise; give `least`, `most` or both")

    @property
    def holds(self) -> bool | None:
        """Return whether all that the measurement allows lies inside; None where a part does, or no number."""
        if math.isnan(self.low) or math.isnan(self.high):
            return None
        if self.least <= self.low and self.high <= self.most:
            return True
        return False if self.high < self.least or self.low > self.most else None


def verdict(findings: list[Finding], *, reason: str = "") -> str:
    """Return what the findings of a claim say of it.

    | verdict | rule |
    |---|---|
    | holds | every finding on the statement as written holds |
    | holds if | one of these does not, and every finding on the statement under its condition holds |
    | refuted | one of these does not, there is no condition, and every finding on the corrected statement holds |
    | undecided | neither: an interval reaches over a limit, or what was put in the statement's place fails too |
    | not testable here | there is no finding, and the reason is given |

    Args:
        findings: of one claim.
        reason: why it cannot be tested.
    """
    by_role = {role: [f.holds for f in findings if f.role == role] for role in ROLES}
    written = by_role["written"]
    if not written:
        return "not testable here" if reason and not findings else "undecided"
    if all(written):
        return "holds"
    if False not in written:
        return "undecided"
    for role, word in (("restricted", "holds if"), ("corrected", "refuted")):
        if by_role[role]:
            return word if all(by_role[role]) else "undecided"
    return "undecided"
