"""The judge of one subject, where the subject does not come back."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from veriformer.properties import Subject
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import named
from veriformer.properties.judging.judge import Judge


def never_ends_at_three(model: Any, x: Tensor) -> Tensor:
    while x.shape[1] == 3:
        pass
    return model(x)  # type: ignore[no-any-return]


def test_a_replay_that_never_ends_is_a_time_out() -> None:
    subject = Subject(kind="feed_forward", build=lambda c: nn.Linear(c.d_model, c.d_model), forward=never_ends_at_three)
    (prop,) = named(["ffn.position-wise"])
    result = Judge(subject, Settings(call_seconds=0.5)).replay(prop, {"config": 0, "dtype": "float32", "T": 3})
    assert result.outcome == "TIMEOUT"
    assert "0.5 s" in result.reason
