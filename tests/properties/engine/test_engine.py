"""The engine's honesty: outcomes, blocking, vacuity, budgets, reproducibility, and that it leaves no trace."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from broken_models import RIGHT, build_right, layer
from veriformer.properties.bench import profiles
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import ReplayError
from veriformer.properties.engine.property import Property, holds
from veriformer.properties.judging import judge as engine
from veriformer.properties.judging.catalogue import in_dependency_order, named, select
from veriformer.properties.judging.judge import Judge
from veriformer.properties.judging.run import run
from veriformer.properties.results.records import Report, Result, SubjectReport, ViolationsFoundError
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject


def prop(check: object, *, kinds: tuple[str, ...] = ("layer", "decoder"), requires: tuple[str, ...] = ()) -> Property:
    """Return a property outside the catalogue."""
    return Property(
        id=f"tests.{getattr(check, '__name__', 'check').replace('_', '-')}", statement="A claim.", formula="a = b",
        source="a test", kinds=kinds, level="core", requires=requires, inapplicable=lambda subject: None,
        sweeps_lengths=False, check=check,  # type: ignore[arg-type]
    )  # fmt: skip


def outcome(subject: Subject, *properties: Property, settings: Settings | None = None) -> Result:
    return run([subject], properties, settings or Settings(profile="quick")).results[-1]


IDENTITY = layer(lambda x: x * 2.0)


def test_a_check_without_witness_is_vacuous() -> None:
    def shows_nothing(case: Case) -> None:
        case.integer("n", 0, 99)

    result = outcome(IDENTITY, prop(shows_nothing))
    assert result.outcome == "VACUOUS"
    assert result.reason == "its premise held 0 times in 5 examples: nothing was shown"


@pytest.mark.parametrize(
    ("got", "expected", "said"),
    [
        (torch.zeros(0), torch.zeros(0), "nothing to compare"),
        (torch.ones(4), torch.ones(4), "the same constant everywhere"),
    ],
)
def test_a_comparison_that_cannot_fail_is_vacuous(got: torch.Tensor, expected: torch.Tensor, said: str) -> None:
    def compares(case: Case) -> None:
        case.built()
        case.close(got, expected, "the claim")
        case.witness()

    result = outcome(IDENTITY, prop(compares))
    assert (result.outcome, said in result.reason) == ("VACUOUS", True)


def test_a_tensor_compared_with_itself_is_vacuous() -> None:
    def compares(case: Case) -> None:
        x = case.normal(2, 3, dtype=torch.float32)
        case.close(x, x, "the claim")

    assert "compared with itself" in outcome(IDENTITY, prop(compares)).reason


def test_nan_never_passes() -> None:
    def compares(case: Case) -> None:
        built = case.built()
        x = case.normal(2, 3, 8, dtype=built.dtype)
        case.close(case.call(built, x) * float("nan"), x, "the outputs differ")
        case.witness()

    assert outcome(IDENTITY, prop(compares)).outcome == "FAIL"


def test_a_property_is_blocked_by_the_one_it_requires() -> None:
    def fails(case: Case) -> None:
        case.require(False, "it does not hold")

    def follows(case: Case) -> None:
        case.witness()

    first = prop(fails)
    second = prop(follows, requires=(first.id,))
    assert [p.id for p in in_dependency_order([second, first])] == [first.id, second.id]
    result = outcome(IDENTITY, first, second)
    assert (result.outcome, result.reason) == ("BLOCKED", "tests.fails must hold first and does not")


def test_a_failure_is_shrunk_recorded_and_replays() -> None:
    def large_lengths_fail(case: Case) -> None:
        length = case.length("T", high=20)
        case.require(length < 7, "a long sequence", got=str(length), expected="below 7")
        case.witness()

    judge = Judge(RIGHT, Settings(profile="standard"))
    result = judge.judge(prop(large_lengths_fail))
    assert result.outcome == "FAIL"
    assert result.counterexample is not None
    assert result.counterexample.choices["T"] == 7
    again = judge.replay(prop(large_lengths_fail), result.counterexample.choices)
    assert again.counterexample is not None
    assert again.counterexample.id == result.counterexample.id
    with pytest.raises(ReplayError, match="the recorded T is 1000000000; it must be one of"):
        judge.replay(prop(large_lengths_fail), {"config": 0, "T": 10**9})
    with pytest.raises(ReplayError, match="the recorded case has no choice 'T'; it was edited"):
        judge.replay(prop(large_lengths_fail), {"config": 0, "S": 7})


def test_a_replay_goes_on_where_the_record_ends() -> None:
    seen: list[list[int]] = []

    def mended(case: Case) -> None:
        length = case.length("T", high=20)
        order = case.permutation("order", 7)
        if order[0] == case.integer("first", 0, 6):
            case.reject("the first one stays")
        seen.append([length, *order, *map(ord, case.text("word")), case.flag("flag")])
        case.witness()

    judge = Judge(RIGHT, Settings(profile="quick"))
    for _ in range(2):
        assert judge.replay(prop(mended), {"config": 0, "T": 7}).outcome == "PASS"
    assert judge.replay(prop(mended), {"config": 0, "T": 7, "order": [0, 1, 2, 3, 4, 5, 6]}).outcome == "PASS"
    assert seen[0] == seen[1]
    assert [row[0] for row in seen] == [7, 7, 7]
    refused = judge.replay(prop(mended), {"config": 0, "T": 7, "order": [0, 1, 2, 3, 4, 5, 6], "first": 0})
    assert (refused.outcome, refused.reason) == ("NOT_APPLICABLE", "every case was given up: the first one stays")


def test_the_time_for_a_property_ends_it_honestly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(profiles.PROFILES, "quick", replace(profiles.PROFILES["quick"], property_seconds=-1.0))  # type: ignore[arg-type]

    def never_runs(case: Case) -> None:
        case.witness()

    result = outcome(IDENTITY, prop(never_runs))
    assert (result.outcome, result.reason) == ("TIMEOUT", "not one example was finished in -1 s")


def test_the_same_seed_gives_the_same_run() -> None:
    seen: list[dict[str, object]] = []

    def notes(case: Case) -> None:
        case.length()
        case.built()
        case.normal(2, dtype=torch.float32)
        seen.append(dict(case.choices))
        case.witness()

    for seed in (1, 1, 2):
        outcome(RIGHT, prop(notes), settings=Settings(profile="quick", seed=seed))
    third = len(seen) // 3
    assert seen[:third] == seen[third : 2 * third]
    assert seen[:third] != seen[2 * third :]


def test_nothing_outside_is_changed_by_a_run() -> None:
    model = build_right(DrawnConfig())
    model.train()
    model.attention.eval()  # type: ignore[union-attr]
    modes = [m.training for m in model.modules()]
    weights = [p.detach().clone() for p in model.parameters()]
    subject = Subject(kind="decoder", module=model, config=DrawnConfig(), declares={"causal": True})
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    before = (torch.rand(1), random.random(), np.random.rand())
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    threads, grad, dtype = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()
    run([subject], named(["numerics"]), Settings(profile="quick"))
    assert (torch.rand(1), random.random(), np.random.rand()) == before
    assert (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()) == (threads, grad, dtype)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_subject_that_cannot_be_built_is_an_error_everywhere() -> None:
    def build(config: DrawnConfig) -> nn.Module:
        raise TypeError("d_model must be a multiple of 7")

    chosen = select(["numerics"], ["numerics.compile"])
    report = run([Subject(kind="layer", build=build)], chosen, Settings(profile="quick"))
    assert {r.outcome for r in report.results} == {"ERROR"}
    assert report.results[0].reason.startswith(
        "build raised TypeError: d_model must be a multiple of 7 (for d_model=8 "
    )
    assert report.exit_status == 2


def test_a_subject_that_does_not_repeat_itself_blocks_the_rest() -> None:
    noisy = layer(lambda x: x + torch.rand_like(x) * 1e-3)
    chosen = select(["numerics"], ["numerics.compile", "numerics.autocast"])
    report = run([noisy], chosen, Settings(profile="quick"))
    assert {r.id: r.outcome for r in report.results} == {
        "numerics.finite": "BLOCKED", "numerics.stateless": "FAIL", "numerics.no-mutation": "BLOCKED",
        "numerics.grad-mode": "BLOCKED", "numerics.strided": "BLOCKED", "numerics.precision-ladder": "BLOCKED",
    }  # fmt: skip


def _report(*outcomes: str, power: dict[str, object] | None = None) -> Report:
    results = [Result(f"a.b{i}", "core", o) for i, o in enumerate(outcomes)]
    return Report([SubjectReport("s", "layer", results=results, power=power)], 0, "quick", versions={})


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        (("PASS",), 0),
        (("PASS", "DEVIATION", "NOT_APPLICABLE"), 0),
        (("PASS", "FAIL"), 1),
        (("PASS", "UNEXPECTED_PASS"), 1),
        (("PASS", "ERROR"), 1),
        (("PASS", "TIMEOUT"), 1),
        (("FAIL", "BLOCKED"), 1),
        (("ERROR",), 2),
        (("PASS", "VACUOUS"), 2),
        (("NOT_APPLICABLE",), 2),
        ((), 2),
    ],
)
def test_exit_status(outcomes: tuple[str, ...], status: int) -> None:
    report = _report(*outcomes)
    assert report.exit_status == status
    assert report.ok == (status == 0)


def test_a_missed_canary_voids_the_run() -> None:
    report = _report("PASS")
    assert report.exit_status == 0
    report.canaries = {"sent": 1, "caught": 0, "missed": ["a decoder that reads the next token"]}
    assert report.exit_status == 2
    with pytest.raises(ViolationsFoundError, match="reads the next token"):
        report.raise_for_violations()


def test_a_fault_that_goes_unnoticed_is_told_and_voids_nothing() -> None:
    power = {"noticed": 0, "tried": 1, "missed": ["the future leaks in"], "faults": []}
    assert _report("PASS", power=power).exit_status == 0


def test_an_unknown_id_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(KeyError, match=r"there is no property 'numerics.finit'; did you mean 'numerics.finite'\?"):
        select(only=["numerics.finit"])


def test_a_malformed_property_is_refused() -> None:
    with pytest.raises(ValueError, match=r"property id 'Bad' is malformed; write family.slug"):
        holds("Bad", statement="s", formula="f", source="s", kinds=("layer",))
    with pytest.raises(ValueError, match=r"there is no kind 'leyer'; the kinds are: softmax"):
        holds("a.b", statement="s", formula="f", source="s", kinds=("leyer",))
    with pytest.raises(ValueError, match=r"round in a circle: tests\.a -> tests\.a"):
        in_dependency_order([replace(prop(lambda case: None), id="tests.a", requires=("tests.a",))])


def test_power_finds_the_faults_put_into_a_right_subject() -> None:
    judge = engine.Judge(RIGHT, Settings(profile="quick"))
    power = judge.prove_power(select())
    assert power is not None
    assert (power["noticed"], power["missed"]) == (power["tried"], [])
    assert power["tried"] >= 3
