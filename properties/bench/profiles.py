"""How thorough a run is: one table of profiles, and the settings of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Profile:
    """Effort of a run.

    Attributes:
        examples: cases a property; at least half of them are drawn by Hypothesis, beside colliding lengths.
        sweep_configs: configurations whose colliding lengths are covered one by one.
        property_seconds: time after which a property stops drawing and keeps what it saw.
        far_operations: multiplications of the forwards of one property at its far lengths, all together.
        tokens: of a sequence that is drawn; longer ones are far ones. None: no limit.
    """

    examples: int
    sweep_configs: int
    property_seconds: float
    far_operations: float
    tokens: int | None = None


PROFILES: Mapping[str, Profile] = {
    # the far lengths take about a second in quick
    "quick": Profile(examples=5, sweep_configs=1, property_seconds=10, far_operations=2e9),
    "standard": Profile(examples=20, sweep_configs=3, property_seconds=30, far_operations=2e10),
    "thorough": Profile(examples=100, sweep_configs=99, property_seconds=180, far_operations=math.inf),
}
"""Every profile by name."""

LARGE_PROFILES: Mapping[str, tuple[float, Profile]] = {
    "quick": (5e10, Profile(examples=5, sweep_configs=1, property_seconds=60, far_operations=2e11)),
    "standard": (8e10, Profile(examples=10, sweep_configs=1, property_seconds=120, far_operations=3e11)),
    "thorough": (1e12, Profile(examples=40, sweep_configs=1, property_seconds=600, far_operations=math.inf)),
}
"""Multiplications of the drawn cases of one property on a large instance, and its effort where they suffice."""


def most_seconds(profile: str) -> float:
    """Return the seconds after which one property of any subject stops in a profile."""
    return max(PROFILES[profile].property_seconds, LARGE_PROFILES[profile][1].property_seconds)


FEWEST = 3  # cases, however large an instance is: each path is walked by the first, every third by each that follows
CALLS = 6  # a case calls on three paths, twice on each
_SHORTEST = 11  # the least of `tokens`: the lengths 1, 2 and 11, and all that are drawn by themselves


def effort_on_large(profile: str, short_call: float, token: float) -> Profile:
    """Return the effort of a profile on a large instance: fewer cases of shorter sequences the more a call costs.

    Args:
        profile: key of `PROFILES`.
        short_call: multiplications of a call on a few tokens.
        token: multiplications of one more token.
    """
    operations, whole = LARGE_PROFILES[profile]
    cases = round(operations / (CALLS * short_call))
    longest = round(operations / (FEWEST * CALLS * token)) // 4  # three samples in a batch, and some paths more
    return replace(whole, examples=max(FEWEST, min(cases, whole.examples)), tokens=max(_SHORTEST, longest))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one run.

    Attributes:
        profile: key of `PROFILES`.
        seed: of every random choice; the same seed gives the same run.
        device: torch device.
        dtypes: judge in these alone; empty: float32, and float64 where the subject computes in it.
        call_seconds: limit for one call of the subject; 0 for none.
        named: ids of properties that were asked for by name: costly ones run in every profile.
        hurries: whether a property stops drawing when its time is over; a canary is judged to the end.
    """

    profile: str = "standard"
    seed: int = 0
    device: str = "cpu"
    dtypes: tuple[torch.dtype, ...] = ()
    call_seconds: float = 30.0
    named: tuple[str, ...] = ()
    hurries: bool = True

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise ValueError(f"there is no profile {self.profile!r}; the profiles are: {', '.join(PROFILES)}")

    @property
    def effort(self) -> Profile:
        """The profile itself."""
        effort = PROFILES[self.profile]
        return effort if self.hurries else replace(effort, property_seconds=math.inf)
