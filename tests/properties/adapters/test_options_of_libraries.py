"""Options of released classes: each is really switched, what it breaks is found, and what is declared has a page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from veriformer.properties import Subject, check
from veriformer.properties.adapters import keras_layers, labml_models, transformer_lens_models
from veriformer.properties.adapters.shared.jax_arrays import JaxModule
from veriformer.properties.adapters.shared.token_tables import OnTokens
from veriformer.properties.known.deviations import read_deviations
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.targets import load

FINDINGS = Path(__file__).parents[3] / "reports" / "gallery" / "findings"
SIZES = DrawnConfig(d_model=8, num_heads=2, num_key_value_heads=2)


def outcome(subject: Subject, name: str) -> str:
    """Return what one property says of a subject."""
    return next(r.outcome for r in check(subject, profile="quick", only=[name]).results if r.id == name)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("torch:MultiheadAttention-causal", "PASS"),
        ("torch:MultiheadAttention-causal-bias-key", "DEVIATION"),
        ("torch:MultiheadAttention-causal-zero-key", "DEVIATION"),
    ],
)
def test_the_causal_hint_is_harmless_unless_a_key_stands_behind_the_sequence(target: str, wanted: str) -> None:
    (subject,) = load(target)
    assert outcome(subject, "attention.backend-agreement") == wanted


@pytest.mark.usefixtures("brief")
def test_queries_at_the_end_of_the_keys_are_aligned_as_declared() -> None:
    (subject,) = load("torch:scaled_dot_product_attention-lower-right")
    assert outcome(subject, "causality.alignment") == "PASS"
    wrong = subject.with_facts(causal_alignment="top-left")
    assert outcome(wrong, "causality.alignment") == "FAIL"


class Windowed(nn.Module):
    """Causal attention that sees `window` positions back, under a pairwise mask too."""

    def __init__(self, config: Any, window: int) -> None:
        super().__init__()
        self.num_heads, self.window = config.num_heads, window
        self.into, self.out = (nn.Linear(config.d_model, share * config.d_model) for share in (3, 1))

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attend from x `[B, T, D]`; a mask `[B, T]` or pairwise."""
        parts = [p.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in self.into(x).chunk(3, dim=-1)]
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(1 - self.window)
        if attention_mask is not None:
            is_padding = attention_mask.shape == x.shape[:2]
            given = attention_mask[:, None, :] if is_padding else attention_mask.expand(len(x), -1, -1)
            seen = (seen & given)[:, None]
        return self.out(nn.functional.scaled_dot_product_attention(*parts, seen).transpose(1, 2).flatten(2))


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("width", "name", "wanted"),
    [
        (3, "attention.pairwise-mask", "PASS"),
        (2, "attention.pairwise-mask", "FAIL"),
        (4, "causality.window", "FAIL"),  # few random masks of a short sequence show a pair that far apart
    ],
)
def test_a_pairwise_mask_is_judged_inside_the_declared_window(width: int, name: str, wanted: str) -> None:
    subject = Subject(
        kind="self_attention",
        build=lambda config: Windowed(config, width),
        mask_forms=("padding", "pairwise"),
        declares={"causal": True, "positions": "none", "window": 3},
        forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    )
    assert outcome(subject, name) == wanted


@pytest.mark.parametrize("adapter", [keras_layers, transformer_lens_models])
def test_windows_are_declared_and_shorter_than_what_is_drawn(adapter: Any) -> None:
    windows = [subject.fact("window") for subject in adapter.SHIPPED.values() if subject.fact("window")]
    assert windows
    assert max(windows) < 5  # lengths of the quick profile begin to pass it there


def test_unfused_attention_of_timm_is_unfused_and_says_the_same() -> None:
    timm_blocks = pytest.importorskip("veriformer.properties.adapters.timm_blocks")
    fused, unfused = (timm_blocks.build_attention(SIZES, fused=given).eval() for given in (True, False))
    unfused.load_state_dict(fused.state_dict())
    assert (fused.fused_attn, unfused.fused_attn) == (True, False)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(fused(x), unfused(x), atol=1e-6)  # unit gain: a few roundings of float32


def test_another_function_of_the_same_parameters_follows_them() -> None:
    jax = pytest.importorskip("jax")
    module = JaxModule({"w": jax.numpy.ones(2)}, lambda params, x: params["w"] * x)
    twice = module.beside(lambda params, x: 2 * params["w"] * x)
    x = torch.tensor([1.0, 3.0])
    assert torch.equal(twice(x), 2 * x)
    with torch.no_grad():
        module.leaves[0].mul_(5)
    assert torch.equal(twice(x), 10 * x)


@pytest.mark.usefixtures("brief")
def test_the_cache_of_linen_is_judged_and_a_broken_one_fails() -> None:
    pytest.importorskip("flax")
    (subject,) = load("flax:linen-decoder")
    assert outcome(subject, "decoding.cache") == "PASS"
    forgetful = replace(subject, cache=lambda model, chunks: torch.cat([subject.forward(model, c) for c in chunks], 1))
    assert outcome(forgetful, "decoding.cache") == "FAIL"


def test_a_part_on_tokens_is_called_on_their_rows() -> None:
    model = OnTokens(SIZES, nn.Identity())
    tokens = torch.tensor([[3, 0, 3]])
    assert torch.equal(model(tokens), model.table.weight[tokens])


def test_attention_free_layers_are_judged_as_causal() -> None:
    assert labml_models.SHIPPED["attention-free"].fact("causal") is True


def test_every_finding_that_an_entry_names_has_a_page_in_the_table() -> None:
    table = (FINDINGS / "README.md").read_text(encoding="utf-8")
    named = {n for e in read_deviations(None).entries for n in re.findall(r"findings/([\w-]+)\.md", e.reason)}
    assert len(named) > 20
    for name in named:
        assert (FINDINGS / f"{name}.md").is_file(), name
        assert f"({name}.md)" in table, name
