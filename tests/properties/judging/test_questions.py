"""What was seen to break is a question where nobody declared what is meant; the answer makes it a pass or a failure."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from veriformer.properties import Report, Result, Subject, check
from veriformer.properties.judging.questions import suggested
from veriformer.properties.results.records import FAIL, OPEN, Counterexample
from veriformer.reference.config import Config
from veriformer.reference.model import build
from veriformer.reports.verdicts import questions, shown_in_full


def decoder(forward: Any, positions: str = "learned", **declares: Any) -> Subject:
    def make(c: Any) -> nn.Module:
        return build(
            Config(
                vocab_size=c.vocab_size, d_model=c.d_model, num_heads=c.num_heads, d_ff=c.d_ff,
                num_layers=c.num_layers, max_len=c.max_len, architecture="decoder", positions=positions,
            )
        )  # fmt: skip

    return Subject(kind="decoder", build=make, forward=forward, declares=declares)


def ignores_the_mask(m: nn.Module, tokens: Tensor, attention_mask: Tensor | None = None) -> Any:
    return m(tokens)


def quiet(_: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    top = scores.amax(-1, keepdim=True).clamp(min=0)
    each = (scores - top).exp()
    return each / (each.sum(-1, keepdim=True) + (-top).exp()) @ v


def opened(report: Report) -> dict[str, str]:
    return {r.id: r.declare for r in report.results if r.outcome == OPEN}


def test_a_mask_that_is_taken_and_not_read_is_no_pass() -> None:
    report = check(decoder(ignores_the_mask), only=["padding"], profile="quick")
    assert opened(report)["padding.every-position-hides"] == "padding_side='right'"
    assert report.exit_status == 1
    (case,) = [r.counterexample for r in report.results if r.id == "padding.every-position-hides"]
    assert case is not None
    assert "the padding mask is not applied" in case.cause


def test_an_answer_ends_the_question() -> None:
    report = check(decoder(ignores_the_mask, padding_side="right"), only=["padding"], profile="quick")
    assert not opened(report)
    assert report.ok, [(r.id, r.reason) for r in report.results if r.outcome == FAIL]


def test_a_wrong_answer_is_a_failure() -> None:
    report = check(decoder(ignores_the_mask, padding_side="both"), only=["padding"], profile="quick")
    assert "padding.every-position-hides" in {r.id for r in report.results if r.outcome == FAIL}
    assert not opened(report)


def test_questions_may_be_left_open() -> None:
    report = check(
        decoder(ignores_the_mask), only=["padding.every-position-hides", "padding.mask-matters"], profile="quick"
    )
    assert report.exit_status == 1
    report.allow_open = True
    assert report.exit_status == 0
    report.raise_for_violations()


def test_the_fact_that_a_cause_names_is_tried_before_it_is_asked_for() -> None:
    """One fact takes all failures back, also those whose cause names none: one question, not a dozen failures."""
    report = check(Subject(kind="attention", forward=quiet), profile="quick")
    assert not [r.id for r in report.results if r.outcome == FAIL]
    assert set(opened(report).values()) == {"sink=True"}
    (subject,) = report.to_json()["subjects"]
    assert len(shown_in_full(subject)) == len(questions(subject)) == 1
    assert check(Subject(kind="attention", forward=quiet, declares={"sink": True}), profile="quick").ok


def test_what_only_a_probe_saw_fails_nobody() -> None:
    def forward(m: nn.Module, tokens: Tensor) -> Any:
        forgetful = m(tokens)
        return forgetful.cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]  # the order is forgotten

    bag = Subject(kind="decoder", build=lambda c: nn.Embedding(c.vocab_size, c.vocab_size), forward=forward)
    report = check(bag, only=["attention.attends", "positions"], profile="quick")
    assert opened(report) == {"attention.attends": "positions='none'"}


@pytest.mark.parametrize(
    ("cause", "facts"),
    [
        ("(declare window=3 if that is meant)", {"window": 3}),
        ("declare positions='none'", {"positions": "none"}),
        ("declare window, the number of tokens", {}),
        ("declare nonsense=3", {}),
        ("declare window='three'", {}),
        ("declare base=500000 if that is meant", {"base": 500000}),
    ],
)
def test_facts_are_read_from_causes(cause: str, facts: dict[str, Any]) -> None:
    found = Counterexample("1", {}, "", "it differs", cause=cause)
    assert suggested(Result("a.b", "core", FAIL, counterexample=found)) == facts


def test_declared_facts_that_nothing_verified_are_told() -> None:
    subject = Subject(
        kind="norm", build=lambda c: nn.LayerNorm(c.d_model), forward=lambda m, x: m(x),
        declares={"norm": "layer", "batch_coupled": False},
    )  # fmt: skip
    (part,) = check(subject, profile="quick").subjects
    assert part.believed == ["batch_coupled"]


class _Silent(nn.Module):
    """A layer of a norm and a linear map that gives no gradients."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(width), nn.Linear(width, width)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.map(self.norm(x)))


@pytest.mark.parametrize("kind", ["layer", "feed_forward"])
def test_a_forward_without_gradients_is_one_question_and_no_error(kind: str) -> None:
    silent = Subject(kind=kind, build=lambda c: _Silent(c.d_model), forward=lambda m, x: m(x),
                     declares={"positions": "none", "sparse": True})  # fmt: skip
    report = check(silent, profile="quick")
    raised = [(r.id, r.reason) for r in report.results if r.outcome == "ERROR"]
    assert not raised
    assert opened(report)["parameters.all-used"] == "inference_only=True"
    assert set(opened(report).values()) == {"inference_only=True"}
    answered = check(silent.with_facts(inference_only=True), only=["parameters", "gradients", "residual"],
                     profile="quick")  # fmt: skip
    assert not opened(answered)
    refused = check(silent.with_facts(inference_only=False), only=["parameters.all-used"], profile="quick")
    assert [r.outcome for r in refused.results if r.id == "parameters.all-used"] == [FAIL]


def test_a_forward_without_gradients_for_its_input_alone_is_noticed() -> None:
    class Half(_Silent):
        @torch.enable_grad()
        def forward(self, x: Tensor) -> Tensor:
            grown = x + torch.relu(self.map(self.norm(x)))
            return grown.detach() if x.requires_grad else grown

    half = Subject(kind="layer", build=lambda c: Half(c.d_model), forward=lambda m, x: m(x))
    report = check(half, only=["residual.jacobian", "parameters.all-used"], profile="quick")
    outcomes = {r.id: r.outcome for r in report.results}
    assert outcomes["parameters.all-used"] == "PASS"
    assert outcomes["residual.jacobian"] == OPEN


def bias(refusal: type[Exception]) -> Any:
    def forward(_: Any, queries: int, keys: int) -> Tensor:
        if queries != keys:
            raise refusal("it is square")
        at = torch.arange(keys)
        return -torch.tensor([2.0**-4, 2.0**-8])[:, None, None] * (at[:, None] - at).abs()

    return forward


def test_a_bias_that_refuses_other_lengths_is_judged_on_equal_ones_and_says_so() -> None:
    facts = {"positions": "alibi"}
    (found,) = check(Subject(kind="position_bias", forward=bias(ValueError), declares=facts), profile="quick").subjects
    assert [note for note in found.probed if note.startswith("equal_lengths = True")]
    declares = {**facts, "equal_lengths": True}
    (said,) = check(
        Subject(kind="position_bias", forward=bias(ValueError), declares=declares), profile="quick"
    ).subjects
    assert "equal_lengths" in said.believed
    for part in (found, said):
        assert not [r.id for r in part.results if r.outcome in ("ERROR", FAIL, OPEN)]


def test_a_bias_that_breaks_at_other_lengths_is_an_error() -> None:
    subject = Subject(kind="position_bias", forward=bias(RuntimeError), declares={"positions": "alibi"})
    (part,) = check(subject, profile="quick").subjects
    assert "ERROR" in {r.outcome for r in part.results}


def test_a_reentrant_checkpoint_is_no_error() -> None:
    class Layer(nn.Module):
        def __init__(self, c: Any) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(c.d_model)
            self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

        def run(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(self.norm(x)).relu())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.run, x, use_reentrant=True)

    subject = Subject(kind="layer", build=Layer, forward=lambda m, x: m(x))
    names = ("gradients.gradcheck", "gradients.finite", "parameters.all-used")
    (part,) = check(subject, profile="quick", only=names).subjects
    results = {r.id: r for r in part.results if r.id in names}
    assert {results[i].outcome for i in names[:2]} == {"NOT_APPLICABLE"}
    assert "use_reentrant=False" in results[names[0]].reason
    counterexample = results[names[2]].counterexample
    assert counterexample is not None
    assert results[names[2]].outcome == OPEN
    assert "use_reentrant=True" in counterexample.cause
