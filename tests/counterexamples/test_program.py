"""Programs: which lines a judgement rests on, and source for values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from veriformer.properties.counterexamples.literals import literal, of_tensor
from veriformer.properties.counterexamples.program import Judged, Line, Program, UnwritableError
from veriformer.properties.counterexamples.source import Sources
from veriformer.properties.definitions import rounding
from veriformer.properties.subject.sizes import DrawnConfig


def program(got: str, *, calls_depend: bool = True) -> Program:
    lines = [
        Line.of("model = made(config, torch.float32)", ["model"]),
        Line.of("x1 = torch.ones(2)", ["x1"]),
        Line.of("x2 = torch.ones(3)", ["x2"]),
        Line.of("y3 = forward(model, x2)", ["y3"], is_call=True),
        Line.of("x1[0] = 7", ["x1"]),
        Line.of("y4 = forward(model, x1)", ["y4"], is_call=calls_depend),
        Line.of("t5 = y4.sum()", ["t5"]),
    ]
    return Program(lines, Judged("close", got, "0.0"))


def texts(lines: list[Line] | None) -> list[str]:
    return [line.text.split(" =")[0] for line in lines or []]


def test_a_judgement_rests_on_what_it_was_made_of_changes_in_place_among_them() -> None:
    assert texts(program("t5").needed()) == ["model", "x1", "x1[0]", "y4", "t5"]


def test_all_calls_are_kept_for_a_subject_that_remembers() -> None:
    assert texts(program("t5").needed(every_call=True)) == ["model", "x1", "x2", "y3", "x1[0]", "y4", "t5"]


@pytest.mark.parametrize("got", ["x2", "7.0", ""])
def test_a_judgement_without_the_subject_is_none(got: str) -> None:
    assert program(got).needed() is None
    assert program(got).needed(every_call=True) is None


@pytest.mark.parametrize(
    "value",
    [1, True, None, 0.1, math.inf, -math.inf, "it's", b"x", range(3), torch.float16, torch.device("cpu"),
     slice(1, None), torch.channels_last, np.float64(0.5), np.int64(3)],
    ids=repr,
)  # fmt: skip
def test_plain_values_are_written_as_they_are(value: Any) -> None:
    assert eval(literal(value), {"torch": torch}) == value


@pytest.mark.parametrize("value", [object(), torch.nn.Linear(1, 1), lambda: 0], ids=["object", "module", "lambda"])
def test_an_object_has_no_source(value: Any) -> None:
    with pytest.raises(UnwritableError, match="an object of "):
        literal(value)


def test_sizes_become_a_plain_record() -> None:
    import types

    made = eval(literal(DrawnConfig()), {"types": types})
    assert (made.d_model, made.d_head, made.max_len) == (8, 4, 32)


@pytest.mark.parametrize(
    "value",
    [torch.tensor([[0.1, -2.0], [math.nan, math.inf]]), torch.zeros(0, 3), torch.full((2, 2), -math.inf),
     torch.tensor([1 + 2j]), torch.tensor([True, False]), torch.tensor(3), torch.randn(3, 2).double()],
)  # fmt: skip
def test_tensors_come_back_to_the_bit(value: torch.Tensor) -> None:
    (text,) = of_tensor(value, [], torch.device("cpu"))
    again = eval(text, {"torch": torch})
    assert (again.dtype, again.shape) == (value.dtype, value.shape)
    assert torch.equal(again.nan_to_num(7.0), value.nan_to_num(7.0))


def test_a_tensor_that_hardly_differs_is_written_as_a_change() -> None:
    known, value = torch.arange(6).view(2, 3), torch.arange(6).view(2, 3)
    value[1, 2] = 9
    assert of_tensor(value, [("x1", known)], torch.device("cpu")) == [
        "x1.clone()", "[1, 2] = torch.tensor(9, dtype=torch.int64)",
    ]  # fmt: skip


def test_a_function_is_pasted_with_what_it_uses_and_ours_is_never_imported() -> None:
    sources = Sources()
    assert sources.expression(rounding.rounding_bound) == "rounding_bound"
    text = "\n".join([*sorted(sources.imports), *sources.chunks])
    assert "veriformer" not in text.replace("veriformer.reference", "")
    scope: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{text}", scope)
    assert scope["rounding_bound"](torch.float32, 8) == rounding.rounding_bound(torch.float32, 8)


def test_two_values_of_one_name_are_refused() -> None:
    sources = Sources()
    sources.expression(rounding.epsilon)

    def epsilon() -> None:
        """Have the same name."""

    epsilon.__qualname__ = "epsilon"
    with pytest.raises(UnwritableError, match="two values are called 'epsilon'"):
        sources.expression(epsilon)
