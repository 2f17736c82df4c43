"""What a recorder of calls and comparisons is told, so that a failing case can be written down as a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from veriformer.properties.bench.pool import Built
from veriformer.properties.subject.paths import Path


class Recording(Protocol):
    """Told by the workbench and by a case what happens; see `counterexamples.recorder`.

    Attributes:
        path: how the subject is called next.
    """

    path: Path

    def know_model(self, built: Built) -> None:
        """Name a model that was built, or the instance that was given."""

    def copied(self, module: Any, twin: Any) -> None:
        """Tell that a model was copied."""

    def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Return `run()`, a call of the subject with these arguments, and write it down."""

    def apply(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Return `function(*args)`, written down as that call; its source goes into the script."""

    def cut_at_embedding(self, module: Any, tokens: Tensor, leaf: Tensor) -> None:
        """Tell that the graph of the last call was cut at the embedding of `tokens`."""

    def judge(self, kind: str, got: Any = None, expected: Any = None, unit: Any = 1.0, limit: float = 0.0) -> None:
        """Record the comparison that is about to be made."""
