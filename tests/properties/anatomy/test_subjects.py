"""The anatomy of whole subjects: what is described, what counts as verified, what is shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties.adapters.recognising import shipped
from veriformer.properties.anatomy.describing import Part
from veriformer.properties.anatomy.traced import traced
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import select
from veriformer.properties.judging.judge import Judge
from veriformer.properties.results.records import FAIL, NOT_APPLICABLE, PASS, believed
from veriformer.properties.subject.subject import Subject
from veriformer.properties.targets import load
from veriformer.reference.config import Config
from veriformer.reference.model import build
from veriformer.tests.mutants.parts import model
from veriformer.tests.traps.architectures import Attention, PreNorm, decoder

ANATOMY = tuple(p for p in select() if p.id.startswith("anatomy."))
FACTS = {"norm": "layer", "norm_placement": "pre", "activation": "relu", "final_norm": True, "embedding_scale": True,
         "attention_scale": "1/sqrt(d_head)", "base": 10000.0}  # fmt: skip


def judged(subject: Subject) -> tuple[Judge, dict[str, str]]:
    judge = Judge(subject, Settings(profile="quick"))
    return judge, {p.id.split(".")[1]: judge.judge(p).outcome for p in ANATOMY}


def reference(**given: Any) -> Subject:
    facts = given.pop("facts", {})
    return model(lambda m: None, facts, architecture="decoder", **given)


def test_what_was_declared_and_seen_inside_is_verified() -> None:
    subject = reference(positions="rotary", facts=FACTS)
    judge, outcomes = judged(subject)
    assert set(outcomes.values()) == {PASS}
    assert not believed(subject.declares, judge.verified)


@pytest.mark.parametrize("positions", ["sinusoidal", "alibi", "learned"])
def test_positions_are_verified_where_they_are_seen(positions: str) -> None:
    facts = {"position_offset": 0} if positions == "learned" else {}
    judge, outcomes = judged(reference(positions=positions, facts=facts))
    assert outcomes["positions"] == PASS
    assert {"positions", *facts} <= judge.verified


def test_what_no_check_could_hold_against_the_subject_stays_believed() -> None:
    class Unseen(nn.Module):
        """No weights, no norm, no activation that is known."""

        def __init__(self, c: Any) -> None:
            super().__init__()
            self.tokens, self.map = nn.Embedding(c.vocab_size, c.d_model), nn.Linear(c.d_model, c.d_model)

        def forward(self, tokens: Tensor) -> Tensor:
            return torch.sin(self.map(self.tokens(tokens)))

    facts = {"activation": "relu", "norm": "layer", "final_norm": True, "positions": "rotary", "base": 100.0,
             "attention_scale": "1", "norm_placement": "pre", "window": 3, "causal": True}  # fmt: skip
    subject = Subject(kind="encoder", build=Unseen, forward=lambda m, tokens: m(tokens), declares=facts)
    judge, outcomes = judged(subject)
    assert set(outcomes.values()) == {NOT_APPLICABLE}
    assert set(believed(facts, judge.verified)) == set(facts)


def test_a_count_verifies_no_fact_that_leaves_it_the_same() -> None:
    (counted,) = (p for p in select() if p.id == "parameters.exact-count")
    (subject,) = load("reference:decoder-rotary")
    judge = Judge(subject, Settings(profile="quick"))
    assert judge.judge(counted).outcome == PASS
    assert "final_norm" in judge.verified
    assert not {"activation", "norm_placement", "positions"} & judge.verified


def test_a_window_longer_than_what_can_be_reached_is_not_verified() -> None:
    judge, outcomes = judged(reference(facts={"window": 500}))
    assert outcomes["mask"] == PASS
    assert "window" not in judge.verified


def test_a_window_is_looked_beyond() -> None:
    judge, outcomes = judged(reference(facts={"window": 20}))
    assert outcomes["mask"] == FAIL
    assert "window" in judge.verified


def test_one_forward_serves_all_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("veriformer.properties.anatomy.flow.traced", lambda *given: calls.append(1) or traced(*given))
    judged(reference(positions="rotary", facts=FACTS))
    assert len(calls) == 3  # of a small model, of one of many heads, and of one of many positions


def described(subject: Subject) -> dict[tuple[str, str], Part]:
    parts = Judge(subject, Settings(profile="quick")).anatomy()
    return {(p.place, p.part): p for p in parts}


def test_a_reference_decoder_is_described_layer_by_layer() -> None:
    subject = Subject(
        kind="decoder",
        module=build(Config(
            architecture="decoder", positions="rotary", norm="rms", activation="swiglu", num_heads=4, d_model=32,
            num_key_value_heads=2, d_ff=48, num_layers=2,
        )),
        forward=lambda m, tokens: m(tokens),
    )  # fmt: skip
    parts = described(subject)
    attention = parts["stack.layers.1.attention", "attention"]
    assert attention.words == (
        "4 heads of 8 channels, 2 of keys and values, scale 0.35355 = 1/sqrt(d_head), mask causal, no bias, "
        "rotary of base 10000, interleaved"
    )
    assert attention.measured["scale"] == pytest.approx(8**-0.5)
    assert parts["stack.final_norm", "norm"].measured["eps"] == 1e-5
    assert parts["stack.layers.0.feed_forward.down", "feed-forward"].words == "silu, gated, 32 -> 48 -> 32"
    assert parts["stack.layers.0.attention.o_proj", "residual"].measured == pytest.approx({"stream": 1, "branch": 1})
    assert "(sqrt(d_model))" in parts["embedding.tokens", "embedding"].words


@pytest.mark.parametrize(
    ("name", "words"),
    [("decoder-learned", "a learned table of"), ("encoder", "sinusoids of base 10000, interleaved, are added")],
)
def test_what_is_added_by_position_is_described(name: str, words: str) -> None:
    parts = described(replace(shipped("reference")[name]))
    assert any(p.part == "positions" and words in p.words for p in parts.values())


class Habits(Attention):
    """A window, slopes of its own, a cap."""

    def allowed(self, length: int) -> Tensor:
        return super().allowed(length).triu(-3)


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (lambda s: 20 * torch.tanh(s / 20), "soft cap 20 on"),
        (lambda s: s + 0.1 * torch.arange(s.shape[-1]).to(s), "ALiBi with slopes 0.1"),
        (lambda s: s * torch.linspace(1, 2, s.shape[1]).to(s)[:, None, None], "(head by head)"),
    ],
)  # fmt: skip
def test_what_is_not_the_textbooks_is_described_with_its_constants(scores: Any, words: str) -> None:
    class Own(Habits):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            made: Tensor = scores(super().scores(q, k))
            return made

    parts = described(decoder(lambda c: PreNorm(c, Own(c, causal=True))))
    told = [p.words for p in parts.values() if p.part == "attention"]
    assert told
    assert all(words in t and "mask causal, window of 4" in t for t in told), told


def test_what_is_no_sequence_model_has_no_anatomy() -> None:
    assert not Judge(shipped("reference")["loss"], Settings(profile="quick")).anatomy()


def test_who_reads_a_trace_has_looked_as_far_as_who_made_it() -> None:
    alibi = reference(positions="alibi", facts={})
    wanted = ("anatomy.scale", "twin.equal")
    seen = []
    for order in (wanted, wanted[::-1]):
        judge = Judge(alibi, Settings(profile="quick"))
        results = {p.id: judge.judge(p) for name in order for p in select() if p.id == name}
        seen.append({name: (results[name].outcome, results[name].reach) for name in wanted})
    assert seen[0] == seen[1]
    assert all(outcome == PASS for outcome, _ in seen[0].values())
