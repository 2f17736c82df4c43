"""Far lengths: which are covered, what they cost, and how a failure there is told."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties import DrawnConfig, Subject, check
from veriformer.properties.bench.guards import Allowance, SubjectTimeoutError
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.searching.reaching import far_lengths, left_out, reach_of
from veriformer.properties.engine.searching.search import Search
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


def large(**told: int) -> Subject:
    """Return a right instance of 6.2 million parameters, its sizes told as they are or otherwise."""
    config = DrawnConfig(d_model=512, num_heads=8, num_layers=1, d_ff=2048, vocab_size=5000, max_len=1024)
    torch.manual_seed(0)
    return Subject(kind="decoder", module=Model(config), config=replace(config, **told), declares={"causal": True})


def test_the_longest_sequence_of_a_large_instance_comes_first() -> None:
    assert far_lengths(bench(large()), 1025) == [1024, 513, 512, 257, 129, 65, 33]
    assert left_out(bench(large()), 1025) == []
    deep = large(num_layers=130)  # whose scores would cost more than the profile has
    assert far_lengths(bench(deep), 1025)[:2] == [1024, 257]
    assert left_out(bench(deep), 1025) == [512, 513]
    assert left_out(bench(deep), 257) == [512, 1024]


def test_what_is_too_costly_is_said() -> None:
    """A forward of 1024 would take longer than the profile has; it is told, and not tried."""
    subject = large(num_layers=4000)
    report = check(subject, only=["causality.no-future-influence"], profile="quick")
    (result,) = report.results
    assert result.outcome == "PASS"
    assert max(result.reach["T"]) < 1024
    (told,) = report.subjects[0].unreached
    assert told.endswith("1024 (too costly for the profile quick)")


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
    assert result.unreached == [
        f"stopped after {len(lengths)} examples, before sequences of 513: the time for one property was over"
    ]


def test_a_right_model_passes_wherever_it_reaches() -> None:
    assert check(decoder(), profile="quick").ok


def test_a_large_instance_is_judged_in_float32_unless_that_cannot_tell() -> None:
    """Differences far below the rounding of float32: float64 alone shows them, and its copy is made then."""
    faint = large()
    with torch.no_grad():
        faint.module.layer.self_attn.out_proj.weight.mul_(1e-7)
    only = ["attention.attends"]
    assert check(large(), only=only, profile="quick").subjects[0].reach["dtype"] == ["float32"]
    report = check(faint, only=only, profile="quick")
    assert report.ok
    assert report.subjects[0].reach["dtype"] == ["float32", "float64"]


def test_the_plan_of_a_large_instance_is_reported() -> None:
    report = check(large(), only=["numerics.finite"], profile="quick")
    assert report.subjects[0].plan.startswith("6.2 million parameters: ")
    assert "one sample each of 33 65 129 257 512 513 1024" in report.subjects[0].plan
    assert check(decoder(), only=["numerics.finite"], profile="quick").subjects[0].plan == ""


@pytest.mark.parametrize("limit", [20, 700])
def test_a_mask_that_ends_in_a_large_instance_is_noticed(limit: int) -> None:
    subject = large()
    subject.module.limit = limit
    (result,) = check(subject, only=["causality.no-future-influence"], profile="quick").results
    assert result.outcome == "FAIL"
    assert result.counterexample is not None
    assert result.counterexample.choices["T"] == limit + 2


def test_a_length_that_takes_a_large_instance_too_long_is_told_and_shorter_ones_are_walked() -> None:
    class Slow(Model):
        """It hangs on its longest sequence, as far as a limit of time tells."""

        def forward(self, tokens: Tensor) -> Tensor:
            if tokens.shape[1] > 1000:
                raise SubjectTimeoutError("one call of the subject took longer than 30 s")
            return super().forward(tokens)

    subject = large()
    subject.module.__class__ = Slow
    made = bench(replace(subject, forward=lambda m, tokens: m(tokens)))
    made.measured["reach",] = 1024
    found = Search(catalogue()["causality.no-future-influence"], made).run()
    assert found is None
    assert made.tally.unreached == ["T=1024 (one call of the subject took longer than 30 s)"]
    assert made.tally.examples >= 5 + 5  # the drawn ones, and one each of 33 65 129 257 513
