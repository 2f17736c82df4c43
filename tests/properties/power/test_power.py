"""A run proves that it can fail: canaries are caught, faults put into a subject are noticed, and nothing is altered."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from broken_models import TinyLanguageModel
from veriformer.properties.adapters.recognising import as_subject, shipped
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.canaries import send
from veriformer.properties.judging.catalogue import named, select
from veriformer.properties.judging.judge import Judge
from veriformer.properties.power import canaries, faults
from veriformer.properties.power.canaries import CANARIES
from veriformer.properties.results.records import FAIL
from veriformer.properties.subject.kinds import KINDS
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject

QUICK = Settings(profile="quick")


@pytest.mark.parametrize("canary", CANARIES, ids=lambda c: c.name)
def test_every_canary_is_caught_by_each_of_its_properties(canary: canaries.Canary) -> None:
    broken = canary.broken(shipped("reference")[canary.model])
    assert broken.kind == canary.kind
    outcomes = {p.id: Judge(broken, QUICK, is_brief=True).judge(p).outcome for p in named(canary.noticed_by)}
    assert set(outcomes.values()) == {FAIL}, outcomes


def test_every_kind_has_a_canary() -> None:
    assert {c.kind for c in CANARIES} == set(KINDS)


def test_a_blind_engine_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veriformer.properties.engine.searching.search.Search.run", lambda self: None)
    found = send(["decoder"], select(), QUICK)
    assert found["caught"] == 0
    assert len(found["missed"]) == found["sent"] > 0


def _fingerprint(module: nn.Module) -> list[Any]:
    found: list[Any] = []
    for name, part in module.named_modules():
        hooks = [
            len(getattr(part, attribute)) for attribute in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        ]
        found.append((name, type(part), part.training, hooks, sorted(vars(part))))
    return found


def _faults_put_into(subject: Subject) -> dict[str, Any]:
    power = Judge(subject, QUICK).prove_power(select())
    assert power is not None
    return power


@functools.cache
def _faults_put_into_shipped(target: str) -> dict[str, Any]:
    library, _, name = target.partition(":")
    return _faults_put_into(shipped(library)[name])


@pytest.fixture
def instance() -> nn.Module:
    return TinyLanguageModel(DrawnConfig()).train()


def test_injection_never_alters_the_users_object(instance: nn.Module) -> None:
    weights, shape = copy.deepcopy(instance.state_dict()), _fingerprint(instance)
    ids = [id(p) for p in instance.parameters()]
    power = _faults_put_into(Subject(kind="decoder", module=instance, declares={"causal": True}, config=DrawnConfig()))
    assert power["tried"] >= 5
    assert all(torch.equal(weights[k], v) for k, v in instance.state_dict().items())
    assert _fingerprint(instance) == shape
    assert [id(p) for p in instance.parameters()] == ids
    assert all(p.grad is None for p in instance.parameters())


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("torch:scaled_dot_product_attention", "the scores of attention are not scaled"),
        ("torch:MultiheadAttention", "the scores of attention are not scaled"),
        ("torch:MultiheadAttention", "scores are divided by sqrt(d_model) in place of sqrt(d_head)"),
        ("torch:TransformerEncoder-causal", "inside attention the mask leaks by one key"),
        ("torch:TransformerEncoder-causal", "inside attention the causal mask is dropped"),
        ("reference:decoder-rotary", "inside attention the mask leaks by one key"),
        ("reference:layer-pre", "the residual connection is dropped"),
        ("reference:encoder", "positions are removed"),
        ("reference:encoder", "the norms act over positions in place of channels"),
        ("reference:encoder", "the padding mask is ignored"),
        ("reference:encoder", "samples of a batch are mixed"),
        ("reference:encoder", "dropout is left on in eval"),
    ],
)
def test_a_fault_put_into_a_right_subject_is_noticed(name: str, wanted: str) -> None:
    power = _faults_put_into_shipped(name)
    noticed = {f["name"]: f["noticed_by"] for f in power["faults"]}
    assert noticed.get(wanted), noticed
    assert power["missed"] == []


def test_a_fault_that_finds_nothing_to_take_hold_of_is_not_counted() -> None:
    class Averages(nn.Module):
        """Causal without attention, masks or norms: a running mean."""

        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

    power = _faults_put_into(as_subject(Averages, kind="layer", causal=True))
    names = {f["name"] for f in power["faults"]}
    assert not any(name.startswith("inside attention") for name in names)
    assert "the future leaks in by one position" in names


def test_every_fault_says_why_it_matters() -> None:
    for fault in faults.FAULTS.values():
        assert len(fault.matters) > 20
        assert fault.noticed_by


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_canaries_are_caught_in_every_dtype(dtype: torch.dtype) -> None:
    found = send(KINDS, select(), Settings(profile="quick", dtypes=(dtype,)))
    assert found["missed"] == []
    assert found["sent"] == len(CANARIES)
