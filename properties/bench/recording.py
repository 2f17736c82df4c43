"""What a recorder of calls and comparisons is told, so that a failing case can be written down as a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from veriformer.properties.subject.paths import Path


class Recording(Protocol):
    """Told by the workbench and by a case what happens; see `counterexamples.recorder`.

    Attributes:
        path: how the subject is called next.
    """

    path: Path

    def aside(self) -> AbstractContextManager[None]:
        """Step aside while the subject itself runs."""

    def know_model(self, built: Any) -> None:
        """Name a built model."""

    def called(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Record one call of the subject."""

    def cut_at_embedding(self, module: Any, tokens: Tensor, leaf: Tensor) -> None:
        """Tell that the graph of the last call was cut at the embedding of `tokens`."""

    def judge(self, kind: str, got: Any = None, expected: Any = None, unit: Any = 1.0, limit: float = 0.0) -> None:
        """Record the comparison that is about to be made."""
