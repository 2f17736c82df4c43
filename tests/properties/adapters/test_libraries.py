"""Released libraries: a fixed dozen of their models, what is recognised, and what is said of a missing one."""

from __future__ import annotations

import pytest

from veriformer.properties import check
from veriformer.properties.adapters.libraries import LIBRARIES, Library
from veriformer.properties.adapters.recognising import as_subject, shipped
from veriformer.properties.adapters.shared.torchvision_stand_in import name_operators
from veriformer.properties.adapters.target import TargetError
from veriformer.properties.judging.catalogue import catalogue
from veriformer.properties.known.deviations import read_deviations
from veriformer.properties.targets import load

name_operators()  # transformers imports torchvision, whose compiled part does not load beside a CPU build of torch

DOZEN = (
    "hf:bert", "hf:roberta", "hf:gpt2", "hf:llama", "hf:mixtral", "hf:t5", "hf:BertForSequenceClassification", "hf:vit",
    "x-transformers:decoder-rotary", "x-transformers:encoder-alibi", "timm:block-layerscale", "flax:nnx-layer-norm",
)  # fmt: skip


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("target", DOZEN)
def test_a_released_model_holds_or_deviates_as_declared(target: str) -> None:
    (subject,) = load(target)
    report = check(subject, profile="quick")
    wrong = [
        f"{r.id}: {r.outcome} {r.reason}"
        for r in report.results
        if r.outcome not in ("PASS", "NOT_APPLICABLE", "DEVIATION")
    ]
    assert not wrong
    assert sum(r.outcome == "PASS" for r in report.results) >= 20


def test_a_released_defect_is_found_and_declared() -> None:
    (subject,) = load("hf:prophetnet")
    (result,) = check(subject, profile="quick", only=["causality.prefix-consistency"], kind=None).results
    assert result.outcome == "DEVIATION"
    assert "transformers-prophetnet.md" in result.reason
    assert result.counterexample is not None
    assert result.error > 1e-3


def test_a_broken_copy_of_a_released_model_is_caught() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=40)
    model = transformers.GPT2LMHeadModel(config).eval()
    assert check(model, profile="quick", only=["causality"]).ok
    for block in model.transformer.h:
        block.attn.is_causal = False
        block.attn.forward = _blind_to_masks(block.attn)
    report = check(model, profile="quick", only=["causality"])
    assert {r.id for r in report.results if r.outcome == "FAIL"} >= {"causality.no-future-influence"}


def _blind_to_masks(attention: object) -> object:
    forward = attention.forward  # type: ignore[attr-defined]

    def call(hidden_states: object, *args: object, attention_mask: object = None, **kwargs: object) -> object:
        return forward(hidden_states, *args, attention_mask=None, **kwargs)

    return call


def test_configurations_classes_and_instances_are_recognised() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
    )
    assert as_subject(transformers.BertModel(config)).kind == "encoder"
    assert as_subject(transformers.GPT2LMHeadModel).kind == "decoder"
    assert as_subject(config).name == "hf:bert"


def test_what_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Library(("x_transformers",), ("a-package",), ("a_module_that_is_not_there",))
    monkeypatch.setitem(LIBRARIES, "x-transformers", missing)  # type: ignore[index]
    with pytest.raises(TargetError, match="a_module_that_is_not_there, which is not installed; install a-package"):
        load("x-transformers:decoder-rotary")


def test_a_misspelt_model_is_told_with_the_nearest() -> None:
    with pytest.raises(TargetError, match="hf has no subject 'brt'; did you mean 'bert'"):
        load("hf:brt")


def test_shipped_deviations_name_properties_and_libraries_that_exist() -> None:
    known = read_deviations(None)
    known.must_name(catalogue())
    for entry in known.entries:
        library, _, _name = entry.subject.partition(":")
        assert library in LIBRARIES or entry.subject.startswith(("nn.", "F.")), entry.subject
        assert "not looked into" not in entry.reason


def test_every_library_has_a_file_with_subjects() -> None:
    for name, library in LIBRARIES.items():
        ours = all(module.startswith("veriformer.") for module in library.modules)  # a plug-in brings its own
        if ours and not library.missing() and name != "hf":
            assert shipped(name)
