"""Options of the reference that later models brought: norms on branches, parallel layers, windows, partial rotary."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from veriformer.reference.attention import attention, window_allowed
from veriformer.reference.blocks import EncoderLayer, ParallelLayer
from veriformer.reference.config import ACTIVATIONS, ARCHITECTURES, PLACEMENTS, Config
from veriformer.reference.counting import count_flops, count_parameters
from veriformer.reference.feedforward import FEED_FORWARDS
from veriformer.reference.model import MODELS, build
from veriformer.reference.rotary import Rotary

SMALL: dict[str, Any] = {"vocab_size": 11, "d_model": 12, "num_heads": 3, "num_layers": 2, "d_ff": 20, "max_len": 16}
TOKENS = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_option_counts_as_derived(architecture: str) -> None:
    options = itertools.product(PLACEMENTS, ("layer", "rms"), ACTIVATIONS[::3], (False, True), (None, False, True))
    for placement, norm, activation, query_key_norm, final_norm in options:
        config = Config(
            **SMALL, architecture=architecture, norm_placement=placement, norm=norm, activation=activation,
            query_key_norm=query_key_norm, final_norm=final_norm, num_key_value_heads=1,
        )  # fmt: skip
        with torch.device("meta"):  # sizes alone
            model = MODELS[architecture](config)
        assert sum(p.numel() for p in model.parameters()) == count_parameters(config).total, config


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_flops_of_options_are_those_of_the_matrix_products(activation: str) -> None:
    config = Config(
        **SMALL, architecture="decoder", activation=activation, parallel=True, norm_placement="sandwich", window=3,
        query_key_norm=True, positions="rotary", rotary_dim=2,
    )  # fmt: skip
    model = build(config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(TOKENS)
    assert counter.get_total_flops() == count_flops(config, 2, 7).total
    assert sum(p.numel() for p in model.parameters()) == count_parameters(config).total


def test_cached_decoding_with_every_option_equals_the_whole() -> None:
    config = Config(
        **SMALL, architecture="decoder", parallel=True, norm_placement="sandwich", window=3, query_key_norm=True,
        positions="rotary", rotary_dim=2, base=100.0,
    )  # fmt: skip
    model = build(config).double().eval()
    mask = torch.tensor([[False, False, True, True, True, True, True], [True] * 7])
    whole, cache = model(TOKENS, mask), model.new_cache()
    parts = zip(TOKENS.split([3, 1, 3], dim=1), mask.split([3, 1, 3], dim=1), strict=True)
    chunks = [model(chunk, part, cache=cache) for chunk, part in parts]
    torch.testing.assert_close(torch.cat(chunks, dim=1)[mask], whole[mask], rtol=1e-11, atol=1e-11)


def _attended(layer: EncoderLayer, y: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = layer.attention(y)[0]
    return made


def test_placements_are_their_formulas() -> None:
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for placement, formula in {
        "sandwich": lambda f, n, m: x + m(f(n(x))),
        "branch": lambda f, n, m: x + m(f(x)),
    }.items():
        layer = EncoderLayer(Config(**SMALL, norm_placement=placement)).double()
        around = layer.around_attention
        with torch.no_grad():
            for norm in (n for n in layer.modules() if hasattr(n, "eps")):
                nn.init.uniform_(norm.weight, 0.5, 2.0, generator=torch.Generator().manual_seed(2))
        attended = functools.partial(_attended, layer)
        middle = formula(attended, around.norm_in, around.norm_change)
        last = layer.around_feed_forward
        expected = middle + last.norm_change(layer.feed_forward(last.norm_in(middle)))
        torch.testing.assert_close(layer(x)[0], expected, rtol=1e-12, atol=1e-12)


def test_a_parallel_layer_adds_both_sublayers_to_one_stream() -> None:
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layer = ParallelLayer(Config(**SMALL)).double()
    attended = layer.attention(layer.around_attention.norm_in(x))[0]
    changed = layer.feed_forward(layer.around_feed_forward.norm_in(x))
    torch.testing.assert_close(layer(x)[0], x + attended + changed, rtol=1e-12, atol=1e-12)


def test_a_query_sees_a_window_of_keys() -> None:
    assert window_allowed(3, 5, 2).int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
    q, k = torch.randn(2, 1, 1, 6, 4, generator=torch.Generator().manual_seed(3)).unbind()
    _, weights = attention(q, k, k, causal=True, window=3)
    assert ((weights[0, 0] > 0).sum(-1)).tolist() == [1, 2, 3, 3, 3, 3]


def test_partial_rotary_turns_the_first_channels_by_their_own_frequencies() -> None:
    x = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    turned = Rotary(4, 100.0)(x, torch.arange(5))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], Rotary(4, 100.0)(x[..., :4], torch.arange(5)))
    assert not torch.allclose(turned[..., :4], Rotary(8, 100.0)(x, torch.arange(5))[..., :4])


def test_normalised_queries_and_keys_do_not_feel_the_size_of_their_projections() -> None:
    config = Config(**SMALL, query_key_norm=True, norm="rms", norm_eps=0.0)
    layer = EncoderLayer(config).double()
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = layer(x)[0]
    with torch.no_grad():
        layer.attention.q_proj.weight *= 3
        layer.attention.q_proj.bias *= 3
    torch.testing.assert_close(layer(x)[0], before, rtol=1e-12, atol=1e-12)


def test_activations_are_their_formulas() -> None:
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(5))
    for name, formula in {
        "relu_squared": lambda u: functional.relu(u) ** 2,
        "quick_gelu": lambda u: u * torch.sigmoid(1.702 * u),
    }.items():
        network = FEED_FORWARDS[name](12, 20)
        torch.testing.assert_close(network(x), network.down(formula(network.up(x))))
    gated = FEED_FORWARDS["geglu_tanh"](12, 20)
    wanted = gated.down(functional.gelu(gated.gate(x), approximate="tanh") * gated.up(x))
    torch.testing.assert_close(gated(x), wanted)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"parallel": True, "norm_placement": "post"}, "norm_placement='post'"),
        ({"parallel": True, "architecture": "encoder_decoder"}, "attends to a memory"),
        ({"positions": "rotary", "rotary_dim": 6}, "rotary_dim was 6.*up to d_head = 4"),
        ({"positions": "rotary", "rotary_dim": 3}, "rotary_dim was 3"),
        ({"window": 0}, "window was 0"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Config(**SMALL, **given)
