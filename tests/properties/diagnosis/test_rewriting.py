"""One small change of the subject's source is found, made for a while, and told where it alone explains failures."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from veriformer.properties import Subject, check
from veriformer.properties.diagnosis.repairs.aside import aside
from veriformer.properties.diagnosis.rewriting.edits import Source, edits_of
from veriformer.properties.diagnosis.rewriting.executed import executed_by, lines_of
from veriformer.properties.diagnosis.rewriting.rewritten import rewritings_of
from veriformer.properties.subject.sizes import DrawnConfig

WIDTH = 3


def changed(text: str) -> set[str]:
    """Return what the edits of a function make of its last statement."""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    kinds = dict.fromkeys(("a", "b"), (int,))
    last = function.body[-1].lineno
    return {edit.mended for edit in edits_of(Source(text), function, {last}, kinds)}


def test_operators_comparisons_numbers_and_names_are_exchanged() -> None:
    made = changed("def f(a, b):\n    c = a * b\n    return c if a - b < 2 else a - b\n")
    tests = {text.removeprefix("return c if ").removesuffix(" else a - b") for text in made}
    assert {"((a) + (b)) < 2", "a - b <= 2", "a - b < 3"} <= tests
    assert "b - b < 2" not in tests
    assert {"((b) - (a)) < 2", "(a) < 2", "(a - b + 1) < 2"} <= tests


def test_what_leaves_a_variable_without_use_is_no_change() -> None:
    made = changed("def f(a, b):\n    return a - b\n")
    assert "return ((a) + (b))" in made
    assert not {"return (a)", "return b - b", "return a - a"} & made


def test_calls_lose_or_exchange_what_they_are_given() -> None:
    made = changed("def f(a, b):\n    return x.transpose(1, 2).softmax(dim=-1).amax()\n")
    assert "return x.transpose(2, 1).softmax(dim=-1).amax()" in made
    assert "return x.transpose(1, 2).softmax(dim=-2).amax()" in made
    assert "return x.transpose(1, 2).softmax(dim=-1).amax(dim=-1)" in made
    assert "return x.softmax(dim=-1).amax()" in made
    assert "return x.transpose(1, 2).softmax(dim=-1).amin()" in made


def test_lines_that_no_run_went_through_are_left() -> None:
    function = ast.parse("def f(a):\n    if a:\n        a = a + 1\n    return a\n").body[0]
    assert isinstance(function, ast.FunctionDef)
    edits = edits_of(Source("def f(a):\n    if a:\n        a = a + 1\n    return a\n"), function, {2, 4}, {})
    assert {edit.line for edit in edits} == {2}


def below(x: Tensor) -> Tensor:
    """Return the lower triangle of a matrix."""
    kept = x.tril(WIDTH - 3)
    return kept


def test_a_change_is_made_for_a_while() -> None:
    x = torch.ones(3, 3)
    (other,) = [r for r in rewritings_of(lambda: below(x)) if "triu" in r.edit.new]
    with other.made() as fits:
        assert fits
        assert torch.equal(below(x), x.triu())
    assert torch.equal(below(x), x.tril())


class Held:
    """Knows a size, and gives closures."""

    def __init__(self, size: int) -> None:
        self.size = size

    def made(self, step: int) -> Callable[[int], int]:
        def add(n: int) -> int:
            return n + step * self.size

        return add


def test_methods_and_what_is_defined_inside_are_gone_through_and_changed() -> None:
    (function,) = executed_by(lambda: Held(2).made(3)(1))[1:]
    assert function.name == "Held.made"
    assert function.kinds["self.size"] == (int,)
    changes = [r for r in rewritings_of(lambda: Held(2).made(3)(1)) if "-" in r.edit.new and "step" in r.edit.new]
    with changes[0].made():
        assert Held(2).made(3)(1) != 7
    assert Held(2).made(3)(1) == 7


def test_lines_are_those_of_the_code_alone() -> None:
    lines = lines_of(lambda: below(torch.ones(2, 2)))
    assert {file for file, _ in lines} == {__file__}


def test_a_question_aside_leaves_this_process_as_it_was() -> None:
    kept = [1]
    assert aside([lambda: [kept.append(2), kept][1], lambda: len(kept)], 20) == [[1, 2], 1]
    assert kept == [1]


def test_a_question_without_an_end_or_an_answer_is_given_up() -> None:
    started = time.monotonic()
    assert aside([lambda: time.sleep(60)], 0.2) == [None]
    assert aside([lambda: 1 / 0], 20) == [None]
    assert time.monotonic() - started < 40


class Attention(nn.Module):
    """Causal attention with a window, whose width a comparison decides."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.num_heads, self.qkv = c.num_heads, nn.Linear(c.d_model, 3 * c.d_model)
        self.out = nn.Linear(c.d_model, c.d_model)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        place = torch.arange(length)
        back = place[:, None] - place[None, :]
        hidden = (back < 0) | self.beyond(back)
        scores = (q @ k.transpose(-2, -1)) / (width // self.num_heads) ** 0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))

    def beyond(self, back: Tensor) -> Tensor:
        return back > WIDTH


class Right(Attention):
    """With a window of three keys."""

    def beyond(self, back: Tensor) -> Tensor:
        return back >= WIDTH


def windowed(module: type[nn.Module]) -> Subject:
    return Subject(
        kind="self_attention",
        build=module,
        forward=lambda m, x: m(x),
        declares={"causal": True, "window": WIDTH},
        target=f"{__name__}:BROKEN",
    )


BROKEN = windowed(Attention)


def test_the_one_change_that_mends_all_failures_leads_their_causes() -> None:
    failures = [r for r in check(BROKEN, profile="quick").results if r.outcome == "FAIL"]
    causes = [r.counterexample.cause for r in failures if r.counterexample]
    begins = "one change makes it right: `return back >= WIDTH` in place of `return back > WIDTH`"
    assert any(cause.startswith(begins) and "test_rewriting.py:" in cause for cause in causes), causes
    scripts = [r.counterexample.script for r in failures if r.counterexample and begins in r.counterexample.cause]
    assert scripts
    assert all("one change makes it right" in " ".join(script.replace("#", " ").split()) for script in scripts)
    assert Attention.beyond.__code__.co_code != Right.beyond.__code__.co_code


def test_of_the_right_one_nothing_fails() -> None:
    assert not [r.id for r in check(windowed(Right), profile="quick").results if r.outcome == "FAIL"]
