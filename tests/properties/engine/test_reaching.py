"""Far lengths: which are covered, what they cost, and how a failure there is told."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties import DrawnConfig, Subject, check
from veriformer.properties.bench.guards import Allowance
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.searching.reaching import far_lengths, reach_of
from veriformer.properties.judging.catalogue import catalogue
from veriformer.properties.judging.judge import Judge


class Model(nn.Module):
    """A causal model whose mask is right up to `limit` positions, and which takes `longest`."""

    limit, longest = 10**9, 10**9

    def __init__(self, config: DrawnConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.table = nn.Embedding(min(config.max_len, self.longest), config.d_model)
        self.layer = nn.TransformerEncoderLayer(config.d_model, config.num_heads, config.d_ff, 0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        mask[self.limit :] = False
        out: Tensor = self.layer(self.tokens(tokens) + self.table(torch.arange(length)), src_mask=mask)
        return out


def decoder(**given: int) -> Subject:
    made = type("Made", (Model,), given)
    return Subject(kind="decoder", build=made, declares={"causal": True, "positions": "learned"})


def bench(subject: Subject, profile: str = "quick") -> Workbench:
    return Workbench(subject, Settings(profile=profile))


def test_one_past_every_power_of_two_and_the_longest_are_covered() -> None:
    assert far_lengths(bench(decoder()), 1025) == [1025, 513, 257, 129, 65, 33]
    assert far_lengths(bench(decoder()), 129) == [129, 65, 33]
    assert far_lengths(bench(decoder()), 0) == []


def test_a_model_that_ends_before_is_walked_up_to_its_end() -> None:
    subject = decoder(longest=100)
    assert reach_of(bench(subject)) == 100
    assert far_lengths(bench(subject), 1025) == [100, 65, 33]


def test_who_asks_first_how_far_a_subject_reaches_has_judged_no_length_more() -> None:
    ids = ["causality.no-future-influence", "causality.prefix-consistency"]
    alone = {i: check(decoder(longest=100), only=[i], profile="quick").results[0] for i in ids}
    together = {r.id: r for r in check(decoder(longest=100), only=ids, profile="quick").results}
    for i in ids:
        assert together[i].reach == alone[i].reach
        assert together[i].paths == alone[i].paths
        assert max(alone[i].reach["T"]) <= 100


def test_what_a_subject_declares_is_the_end() -> None:
    assert far_lengths(bench(decoder().with_facts(max_len=50)), 1025) == [50, 33]


def test_a_large_instance_is_walked_as_far_as_the_effort_goes() -> None:
    config = DrawnConfig(d_model=256, num_heads=4, num_layers=1, d_ff=512, vocab_size=4000, max_len=1024)
    whole = Subject(kind="decoder", module=Model(config), config=config, declares={"causal": True})
    assert {33, 65, 129} < set(far_lengths(bench(whole), 1025))
    assert 1024 in far_lengths(bench(whole, "thorough"), 1025)
    large = replace(config, d_model=1024, num_heads=16, d_ff=4096, vocab_size=30000)
    huge = Subject(kind="decoder", module=Model(large), config=large, declares={"causal": True})
    assert max(far_lengths(bench(huge), 1025), default=0) < 200


@pytest.mark.parametrize("limit", [40, 100, 300, 600])
def test_a_failure_is_told_at_the_first_length_that_fails(limit: int) -> None:
    report = check(decoder(limit=limit), only=["causality.no-future-influence"], profile="quick")
    (result,) = report.results
    assert result.outcome == "FAIL"
    assert result.counterexample is not None
    assert result.counterexample.choices["T"] == limit + 2  # the first wrong output, and one input behind it
    assert "it begins with sequences of" in result.counterexample.cause


def test_how_far_it_was_looked_is_reported() -> None:
    report = check(decoder(), only=["causality"], profile="quick")
    assert report.subjects[0].reach["T"] == [1, 1025]
    assert set(report.subjects[0].reach["dtype"]) >= {"float32", "float64"}


@pytest.mark.parametrize(("hangs", "told"), [(range(513, 2000), 1025), (range(513, 514), 513), (range(200, 258), 257)])
def test_a_hang_at_a_far_length_is_told_there(hangs: range, told: int) -> None:
    class Hangs(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            while tokens.shape[1] in hangs:
                time.sleep(1)
            return super().forward(tokens)

    subject = Subject(kind="decoder", build=Hangs, declares={"causal": True, "positions": "learned"})
    judge = Judge(subject, Settings(profile="quick", call_seconds=0.5))
    result = judge.judge(catalogue()["causality.no-future-influence"])
    assert (result.outcome, result.reason) == (
        "TIMEOUT", f"one call of the subject took longer than 0.5 s, with sequences of {told}",
    )  # fmt: skip


def test_what_time_did_not_reach_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge(decoder(), Settings(profile="quick"))
    lengths: list[int] = []

    def check_one(case: Case) -> None:
        lengths.append(case.length("T"))
        case.witness()

    prop = replace(catalogue()["causality.no-future-influence"], check=check_one)
    monkeypatch.setattr(Allowance, "is_spent", property(lambda self: max(lengths, default=0) > 500))
    result = judge.judge(prop)
    assert result.outcome == "PASS"
    assert (
        result.reason
        == f"stopped after {len(lengths)} examples, before sequences of 513: the time for one property was over"
    )


def test_a_right_model_passes_wherever_it_reaches() -> None:
    assert check(decoder(), profile="quick").ok
