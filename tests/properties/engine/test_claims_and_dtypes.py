"""What is claimed and not reached, sizes that are refused, and half precision one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties import DrawnConfig, Subject, check
from veriformer.properties.bench.noise import nudged, sensitivity
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RandomDraws
from veriformer.properties.engine.searching.reaching import far_cases
from veriformer.properties.judging.catalogue import catalogue
from veriformer.properties.results.records import Result, unreached_of
from veriformer.reports.reach import reach_changes

INFLUENCE = "causality.no-future-influence"


class Model(nn.Module):
    """A causal model that takes `longest` positions, `widths` of some kind, and masks as `hidden` says."""

    longest = 10**9

    def __init__(self, config: DrawnConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.table = nn.Embedding(min(config.max_len, self.longest), config.d_model)
        self.score, self.value = (nn.Linear(config.d_model, config.d_model) for _ in range(2))

    def masked(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return scores.masked_fill(hidden, -torch.inf)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.table(torch.arange(length))
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = self.masked(self.score(x) @ x.transpose(1, 2) * x.shape[-1] ** -0.5, hidden)
        return x + scores.softmax(dim=-1) @ self.value(x)


def decoder(cls: type[nn.Module] = Model, **given: Any) -> Subject:
    facts = {"causal": True, "positions": "learned"} | given.pop("declares", {})
    return Subject(kind="decoder", build=type("Made", (cls,), given), declares=facts)


def result_of(subject: Subject, name: str = INFLUENCE, **given: Any) -> Result:
    (result,) = check(subject, only=[name], profile="quick", **given).results
    return result


def test_a_declared_length_that_is_refused_is_asked_for() -> None:
    report = check(
        decoder(longest=100, declares={"max_len": 512}), only=["numerics.finite", INFLUENCE], profile="quick"
    )
    asked = {r.id: r.declare for r in report.results if r.outcome == "OPEN"}
    assert asked == {"numerics.finite": "max_len=100"}
    assert report.subjects[0].claims == {"T": 512}
    assert report.subjects[0].reach["T"][1] == 100
    assert list(report.subjects[0].unreached) == ["T 512 (refused beyond 100)"]


def test_a_declared_length_is_walked_to_its_end_and_no_question_is_asked() -> None:
    report = check(decoder(declares={"max_len": 2048}), only=["numerics.finite", INFLUENCE], profile="quick")
    assert report.ok
    assert report.subjects[0].reach["T"][1] == 2048
    assert not report.subjects[0].unreached


def test_what_does_not_fit_into_memory_is_told() -> None:
    result = result_of(decoder(declares={"max_len": 100_000}))
    assert result.outcome == "PASS"
    assert result.unreached == ["T 100000 (memory)"]


def test_what_costs_too_much_is_told() -> None:
    config = DrawnConfig(d_model=64, num_heads=1, num_layers=1, d_ff=64, vocab_size=40_000, max_len=1024)
    subject = Subject(kind="decoder", module=Model(config), config=config, declares={"causal": True})
    bench = Workbench(subject, Settings(profile="quick"))
    lengths = [fixed["T"] for fixed in far_cases(bench, catalogue()[INFLUENCE]) if fixed["reach"] == "long"]
    assert max(lengths) < 1024
    assert bench.tally.unreached == ["T 1024 (too costly for the profile quick)"]


def test_what_one_property_left_out_another_may_have_reached() -> None:
    told = ["T 512 (memory)", "odd width (refused: no)"]
    short = Result("a.a", "core", "PASS", reach={"T": [1, 65]}, unreached=told)
    long = Result("a.b", "core", "PASS", reach={"T": [1, 512]})
    assert unreached_of([short, long]) == {"odd width (refused: no)": ["a.a"]}
    assert unreached_of([short]) == {sentence: ["a.a"] for sentence in told}


def test_the_ends_of_a_domain_are_walked() -> None:
    subject = Subject(kind="decoder", build=Model, declares={"causal": True}, domain={"d_model": (32, 64, 512)})
    report = check(subject, only=[INFLUENCE], profile="quick")
    assert report.ok
    assert report.subjects[0].reach["d_model"] == [32, 512]


def test_a_right_model_that_refuses_odd_widths_is_right() -> None:
    class Even(Model):
        def __init__(self, config: DrawnConfig) -> None:
            if config.d_model % 2:
                raise ValueError(f"d_model must be even, was {config.d_model}")
            super().__init__(config)

    report = check(decoder(Even), only=[INFLUENCE], profile="standard")
    assert report.ok
    (told,) = report.subjects[0].unreached
    assert told.startswith("odd width (refused: build raised ValueError: d_model must be even, was 65")


def test_standard_looks_at_every_width_and_quick_at_one_more() -> None:
    prop = catalogue()[INFLUENCE]
    rows = {
        profile: {f["reach"] for f in far_cases(Workbench(decoder(), Settings(profile=profile)), prop)} - {"long"}
        for profile in ("quick", "standard")
    }
    assert rows["standard"] == {
        "wide",
        "eight heads",
        "odd heads",
        "odd width",
        *(f"heads of {n}" for n in (32, 80, 96, 128)),
    }
    assert "wide" in rows["quick"]
    assert len(rows["quick"]) == 2


def test_both_ends_of_a_large_vocabulary_are_used() -> None:
    bench = Workbench(decoder(), Settings(profile="quick"))
    for seed in range(5):
        case = Case(bench, RandomDraws(seed, {"reach": "wide"}))
        ids = case.tokens(2, 4)
        assert {0, case.config().vocab_size - 1} <= set(ids.flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_leak_below_one_rounding_shows_in_half_precision(dtype: torch.dtype) -> None:
    class Soft(Model):
        def masked(self, scores: Tensor, hidden: Tensor) -> Tensor:
            return scores.masked_fill(hidden, -7.0 if scores.dtype == dtype else -torch.inf)

    result = result_of(decoder(Soft))
    assert (result.outcome, result.declare) == ("OPEN", "half_precision=False")
    assert result.counterexample is not None
    in_dtype = result.counterexample.choices["dtype"] == str(dtype).removeprefix("torch.")
    assert in_dtype or "autocast" in result.counterexample.path
    assert not in_dtype or "the same case holds in float32" in result.counterexample.cause
    assert result_of(decoder(Soft, declares={"half_precision": False})).outcome == "PASS"
    assert result_of(decoder(Soft, declares={"half_precision": True})).outcome == "FAIL"


def test_what_refuses_half_precision_is_left() -> None:
    class Wide(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            if self.value.weight.dtype in (torch.bfloat16, torch.float16):
                raise RuntimeError("not implemented for 'Half'")
            return super().forward(tokens)

    assert check(decoder(Wide), only=["causality"], profile="quick").ok


def test_every_dtype_is_walked() -> None:
    for name in (INFLUENCE, "causality.prefix-consistency"):
        seen = check(decoder(), only=[name], profile="standard").subjects[0].reach["dtype"]
        assert set(seen) == {"float32", "float64", "bfloat16", "float16"}


def test_parameters_moved_together_are_moved_as_one_by_one() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    seen: list[list[Tensor]] = []

    def call(module: nn.Module, inputs: list[Tensor]) -> Tensor:
        seen.append([p.detach().clone() for p in module.parameters()])
        out: Tensor = module(*inputs)
        return out

    kept = [p.detach().clone() for p in model.parameters()]
    sensitivity(model, call, [torch.ones(2, 5)], torch.float32, torch.Generator().manual_seed(3), 1e-3)
    generator = torch.Generator().manual_seed(3)
    assert all(torch.equal(nudged(p, generator, 1e-3), moved) for p, moved in zip(kept, seen[1], strict=True))


def test_how_far_was_looked_is_compared() -> None:
    def record(longest: int) -> dict[str, Any]:
        return {"subjects": [{"name": "mine", "target": "", "results": [], "reach": {"T": [1, longest]}, "claims": {}}]}

    (change,) = reach_changes([("a.json", record(1025)), ("b.json", record(65)), ("c.json", record(65))])
    assert change == {"name": "mine", "from": "a.json", "before": "T 1..1025", "to": "b.json", "after": "T 1..65"}


def test_a_right_model_that_refuses_narrow_heads_is_right() -> None:
    class Wide(Model):
        def __init__(self, config: DrawnConfig) -> None:
            if config.d_model // config.num_heads < 4:
                raise ValueError("heads of four channels or more")
            super().__init__(config)

    report = check(
        decoder(Wide), only=[INFLUENCE, "causality.first-token", "padding.content-irrelevant"], profile="quick"
    )
    assert report.ok
    assert all("refused" not in r.reason for r in report.results)
    assert any("heads of four channels or more" in told for told in report.subjects[0].unreached)
