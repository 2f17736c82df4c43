"""What a fault put into a subject is: a broken `forward`, and whether it broke anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Forward = Callable[..., Tensor]
"""`forward(model, *inputs)` of a subject."""


@dataclass
class Injected:
    """A broken forward.

    Attributes:
        forward: called in place of the right one.
        changes: grows with every change that was really made, for faults that need something to take hold of; None
            for those that always do.
    """

    forward: Forward
    changes: list[int] | None = field(default=None)

    @property
    def took_hold(self) -> bool:
        """Whether the fault found what it breaks."""
        return self.changes is None or bool(self.changes)


Wrap = Callable[[Any, float], Injected]
"""From a right forward, and the share of the wrong term in the output, to a broken one."""
