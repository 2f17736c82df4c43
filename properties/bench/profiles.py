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
    """

    examples: int
    sweep_configs: int
    property_seconds: float


PROFILES: Mapping[str, Profile] = {
    "quick": Profile(examples=5, sweep_configs=1, property_seconds=10),
    "standard": Profile(examples=20, sweep_configs=3, property_seconds=30),
    "thorough": Profile(examples=100, sweep_configs=99, property_seconds=180),
}
"""Every profile by name."""


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
