"""Hugging Face transformers: what small models reach: windows, options, caches, implementations of attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from veriformer.properties import check
from veriformer.properties.adapters.huggingface import SHIPPED
from veriformer.properties.adapters.huggingface_backends import NotSwitchedError, attention_through, prepared
from veriformer.properties.adapters.huggingface_building import build
from veriformer.properties.adapters.huggingface_calls import forward_causally, transformers
from veriformer.properties.adapters.huggingface_variants import VARIANTS
from veriformer.properties.adapters.shared.sizes_of_types import WINDOW
from veriformer.properties.adapters.shared.small_configuration import small_configuration
from veriformer.properties.subject.palette import palette

LONGEST_DRAWN = 9
"""The longest of the lengths that every property draws (`Drawing.length`)."""


def _built(name: str) -> Any:
    torch.manual_seed(0)
    subject = SHIPPED[name]
    return subject.build(palette(subject)[0]).eval()


def test_windows_are_shorter_than_what_is_drawn() -> None:
    names = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "local_attention")
    found = []
    for name in ("mistral", "gemma2", "inkling_text", "gpt_neo", "recurrent_gemma", "modernbert", "cohere2", "flint"):
        config_class = transformers().CONFIG_MAPPING[name]
        small = small_configuration(config_class, palette(SHIPPED[name])[0]).to_dict()
        found += [small[window] for window in names if window in config_class().to_dict()]
    assert len(found) >= 8
    assert max(found) <= LONGEST_DRAWN


@pytest.mark.parametrize("name", ["gemma2", "laguna", "dots1"])
def test_layers_with_and_without_a_window_both_appear(name: str) -> None:
    assert set(_built(name).config.layer_types) == {"sliding_attention", "full_attention"}


def test_a_documented_window_is_declared_where_all_layers_have_it() -> None:
    assert SHIPPED["mistral"].declares["window"] == WINDOW
    assert "window" not in SHIPPED["gemma2"].declares
    assert "window" not in SHIPPED["llama"].declares


@pytest.mark.parametrize("window", [WINDOW, WINDOW + 1])
def test_a_window_that_is_one_too_wide_fails(window: int) -> None:
    library, subject = transformers(), SHIPPED["mistral"]

    def wide(sizes: Any) -> Any:
        return build(library.MistralForCausalLM, library.MistralConfig, sizes, sliding_window=window)

    (result,) = check(replace(subject, build=wide), profile="quick", only=["anatomy.mask"]).results
    assert result.outcome == ("PASS" if window == WINDOW else "FAIL")


@pytest.mark.parametrize(("name", "holds"), [("mamba2", True), ("mamba", False)])
def test_state_space_models_decode_through_their_cache(name: str, holds: bool) -> None:
    subject, model = SHIPPED[name], _built(name)
    tokens = torch.randint(0, 20, (2, 9))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
        whole, cached = subject.forward(model, tokens), subject.cache(model, list(tokens.split([4, 5], dim=1)))
        single = subject.cache(model, list(tokens.split(1, dim=1)))
    assert torch.allclose(single, whole, atol=1e-4)
    assert torch.allclose(cached, whole, atol=1e-4) is holds  # a defect of the release: transformers-mamba.md


def test_a_static_cache_is_another_model_of_the_sweep() -> None:
    subject, model = SHIPPED["mistral-static-cache"], _built("mistral-static-cache")
    tokens = torch.randint(0, 20, (2, 9))
    with torch.no_grad():
        whole, cached = subject.forward(model, tokens), subject.cache(model, list(tokens.split([4, 1, 4], dim=1)))
    assert torch.allclose(cached, whole, atol=1e-4)


def test_the_options_of_variants_are_read() -> None:
    smallest = palette(SHIPPED["llama"])[0]
    for name, variant in VARIANTS.items():
        sizes = replace(smallest, num_layers=variant.sizes.get("num_layers", (2,))[0])
        config_class = transformers().CONFIG_MAPPING[variant.model_type]
        small, own = (small_configuration(config_class, sizes, **more) for more in (variant.options, {}))
        changed = {**small.to_dict(), "attention": small._attn_implementation} != {
            **own.to_dict(), "attention": own._attn_implementation,
        }  # fmt: skip
        assert changed or variant.task or variant.cache, name


def test_attention_that_is_asked_for_is_gone_through() -> None:
    model, tokens = _built("llama"), torch.randint(0, 20, (1, 5))
    whole = forward_causally(model, tokens)
    with attention_through("eager"):
        eager = forward_causally(model, tokens)
        assert model.config._attn_implementation == "eager"
    assert torch.allclose(eager, whole, atol=1e-5)
    assert model._fused_calls == {"sdpa": 2, "eager": 0}
    assert prepared(model)[1] == "sdpa"


def test_attention_that_is_not_switched_is_an_error() -> None:
    model = _built("falcon")  # is built for one implementation, and tells by a warning that it stays with it
    with attention_through("eager"), pytest.raises(NotSwitchedError, match="not switched to by the model"):
        prepared(model)
    assert not SHIPPED["falcon"].backends


def test_a_switch_that_only_the_configuration_sees_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = _built("llama"), torch.randint(0, 20, (1, 5))
    forward = type(model).forward

    @contextmanager
    def as_sdpa(config: Any) -> Iterator[None]:
        chosen, config._attn_implementation_internal = config._attn_implementation_internal, "sdpa"
        yield
        config._attn_implementation_internal = chosen

    def stubborn(self: Any, **given: Any) -> Any:
        with as_sdpa(self.config):
            return forward(self, **given)

    monkeypatch.setattr(model, "forward", stubborn.__get__(model))
    with attention_through("eager"), pytest.raises(NotSwitchedError, match="fused kernel was called"):
        forward_causally(model, tokens)
