"""The reference models: every combination of options builds, counts as derived, and obeys what the textbook says."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from veriformer.reference.blocks import DropPath
from veriformer.reference.config import (
    ARCHITECTURES,
    INITS,
    NORMS,
    POSITIONS,
    Config,
)
from veriformer.reference.counting import PUBLISHED, count_flops, count_parameters, encoder_layer_parameters
from veriformer.reference.model import MODELS, Classifier, Decoder, build, positions_from
from veriformer.reference.position_bias import T5Bias, alibi_slopes, t5_bucket
from veriformer.reference.positions import LearnedPositions, sinusoidal
from veriformer.reference.rotary import Rotary

SMALL = {"vocab_size": 11, "d_model": 12, "num_heads": 6, "num_layers": 2, "d_ff": 20, "max_len": 16}
TOKENS = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_combination_counts_as_derived(architecture: str) -> None:
    pools = ("mean", "weighted", "cls") if architecture == "classifier" else ("mean",)
    ties = (False, True) if "decoder" in architecture else (False,)
    placements = ("pre", "post")  # the others: test_options.py
    options = itertools.product(POSITIONS, NORMS, placements, ("relu", "swiglu"), (None, 2), (True, False), pools, ties)
    for positions, norm, placement, activation, groups, bias, pooling, tied in options:
        config = Config(
            **SMALL, architecture=architecture, positions=positions, norm=norm, norm_placement=placement, d_head=4,
            activation=activation, num_key_value_heads=groups, bias=bias, pooling=pooling, num_registers=2, tied=tied,
        )  # fmt: skip
        with torch.device("meta"):  # sizes alone
            model = MODELS[architecture](config)
        assert sum(p.numel() for p in model.parameters()) == count_parameters(config).total, config


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("residual", [True, False])
def test_every_model_runs_and_trains(architecture: str, positions: str, residual: bool) -> None:
    model = build(
        Config(**SMALL, architecture=architecture, positions=positions, residual=residual, dropout=0.1, drop_path=0.1)
    )
    arguments = (TOKENS, TOKENS[:, :4]) if architecture == "encoder_decoder" else (TOKENS,)
    output = model(*arguments)
    assert output.dtype == torch.float32
    assert bool(output.isfinite().all())
    output.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters() if p.numel())
    twice = [model.eval()(*arguments) for _ in range(2)]
    assert torch.equal(*twice)


@pytest.mark.parametrize("positions", POSITIONS)
def test_cached_decoding_equals_the_whole(positions: str) -> None:
    model = build(Config(**SMALL, architecture="decoder", positions=positions)).double().eval()
    mask = torch.tensor([[False, False, True, True, True], [True] * 5])
    whole = model(TOKENS, mask)
    for cuts in ([1, 1, 1, 1, 1], [2, 3], [4, 1], [5]):
        cache = model.new_cache()
        parts = zip(TOKENS.split(cuts, dim=1), mask.split(cuts, dim=1), strict=True)
        chunks = [model(chunk, part, cache=cache) for chunk, part in parts]
        # float64: other shapes, so another order of summation over at most 20 terms in 2 layers
        torch.testing.assert_close(torch.cat(chunks, dim=1)[mask], whole[mask], rtol=1e-11, atol=1e-11)
    order = torch.tensor([1, 0])
    cache = model.new_cache()
    model(TOKENS[:, :4], mask[:, :4], cache=cache)
    cache.reorder(order)
    again = model(TOKENS[order, 4:], mask[order, 4:], cache=cache)
    torch.testing.assert_close(again[:, -1], whole[order, -1], rtol=1e-11, atol=1e-11)


def test_published_counts() -> None:
    assert encoder_layer_parameters(128, 8) == 12 * 128**2 + 13 * 128
    course = Config(vocab_size=1000, d_model=128, num_heads=8, num_layers=6, norm_placement="post")
    assert count_parameters(course).total == 1_317_632
    assert {name: round(p.count / 1e6) for name, p in PUBLISHED.items()} == {
        "Transformer base": 63, "Transformer big": 214, "BERT base": 109, "GPT-2 small": 124, "GPT-3": 174604,
    }  # fmt: skip
    gpt2 = Config(
        architecture="decoder", vocab_size=50257, d_model=768, num_heads=12, num_layers=12, max_len=1024,
        positions="learned", tied=True, activation="gelu_tanh",
    )  # fmt: skip
    assert count_parameters(gpt2).total == PUBLISHED["GPT-2 small"].count == 124_439_808


def test_flops_are_those_of_the_matrix_products() -> None:
    """torch counts the FLOPs of a forward pass itself; the formula must give the same number."""
    from torch.utils.flop_counter import FlopCounterMode

    for architecture, activation, groups in itertools.product(ARCHITECTURES, ("relu", "swiglu"), (None, 2)):
        config = Config(
            **SMALL, architecture=architecture, activation=activation, num_key_value_heads=groups, pooling="weighted"
        )
        model = build(config).eval()
        arguments = (TOKENS, TOKENS[:, :4]) if architecture == "encoder_decoder" else (TOKENS,)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(*arguments)
        length = 4 if architecture == "encoder_decoder" else 5
        assert counter.get_total_flops() == count_flops(config, 2, length, 5).total, config


def test_registers_are_never_read_and_padding_is_not_pooled() -> None:
    config = Config(**SMALL, architecture="classifier", positions="none", pooling="cls", num_registers=2)
    model = build(config).double().eval()
    assert isinstance(model, Classifier)
    mask = torch.tensor([[True, True, True, False, False], [True] * 5])
    short = model(TOKENS[:1, :3])
    torch.testing.assert_close(model(TOKENS, mask)[:1], short, rtol=1e-11, atol=1e-11)
    other = model.extras.detach().clone()
    other[1:, ::2] *= -3  # a register takes part in attention, so it matters ...
    before = model(TOKENS).detach()
    model.extras.data.copy_(other)
    assert float((model(TOKENS) - before).detach().abs().max()) > 1e-3
    model.extras.data[1:] = -model.extras.data[1:]
    assert bool(model(TOKENS).isfinite().all())


def test_positions_follow_the_mask() -> None:
    mask = torch.tensor([[False, True, True], [True, True, False]])
    assert positions_from(mask).tolist() == [[0, 0, 1], [0, 1, 1]]


def test_sinusoidal_takes_any_length_and_odd_widths() -> None:
    table = sinusoidal(torch.tensor([0, 1, 10**6]), 5)
    assert table.shape == (3, 5)
    assert float(table[2, 0]) == pytest.approx(math.sin(10**6), abs=1e-9)  # float64 argument reduction at 1e6


def test_learned_positions_end_with_a_clear_error() -> None:
    with pytest.raises(
        ValueError, match=r"reaches position 4, the learned table ends at 3; build the model with a larger"
    ):
        LearnedPositions(8, 4)(torch.zeros(1, 5, 8), torch.arange(5)[None])


def test_rotary_angles_do_not_depend_on_the_dtype_of_the_model() -> None:
    rotary = Rotary(8)
    x = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    far = torch.tensor([100_000])
    exact = rotary(x.double(), far)
    # the inputs are rounded to bfloat16 (2^-9 relatively), the angles are not
    assert float((rotary(x.bfloat16(), far).double() - exact).abs().max()) < 4 * 2.0**-8 * float(x.abs().max())


def test_alibi_slopes_are_the_published_ones() -> None:
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(6) == [*alibi_slopes(4), 2.0**-1, 2.0**-3]


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets_follow_the_published_code(bidirectional: bool) -> None:
    def published(relative: int, num_buckets: int, max_distance: int) -> int:
        bucket, n = 0, -relative
        if bidirectional:
            num_buckets //= 2
            bucket += num_buckets if n < 0 else 0
            n = abs(n)
        else:
            n = max(n, 0)
        exact = num_buckets // 2
        if n < exact:
            return bucket + n
        ratio = torch.log(torch.tensor(n / exact)) / math.log(max_distance / exact)
        return bucket + min(exact + int(ratio * (num_buckets - exact)), num_buckets - 1)

    relative = torch.arange(-200, 200)
    got = t5_bucket(relative, bidirectional=bidirectional, num_buckets=32, max_distance=128).tolist()
    assert got == [published(int(r), 32, 128) for r in relative]
    assert T5Bias(4, bidirectional=bidirectional)(torch.arange(3)[None], torch.arange(5)[None]).shape == (1, 4, 3, 5)


def test_drop_path_keeps_the_expectation() -> None:
    torch.manual_seed(0)
    kept = DropPath(0.25).train()(torch.ones(4000, 1, 1))
    assert sorted({round(v, 5) for v in kept.flatten().tolist()}) == [0.0, 1.33333]
    # a binomial mean: 6 standard deviations of sqrt(0.25 * 0.75 / 4000) * 4/3
    assert abs(float(kept.mean()) - 1) < 6 * math.sqrt(0.25 * 0.75 / 4000) * 4 / 3


def test_dropout_is_at_the_five_places_and_nowhere_else() -> None:
    model = build(
        Config(
            **SMALL, architecture="encoder", dropout=0.1, attention_dropout=0.2, ffn_dropout=0.3, embedding_dropout=0.4
        )
    )
    rates = {name: m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    assert rates["embedding.dropout"] == 0.4
    assert {rates[f"stack.layers.{i}.attention.dropout"] for i in (0, 1)} == {0.2}
    assert {rates[f"stack.layers.{i}.feed_forward.dropout"] for i in (0, 1)} == {0.3}
    assert {rates[f"stack.layers.{i}.around_attention.dropout"] for i in (0, 1)} == {0.1}
    assert {rates[f"stack.layers.{i}.around_feed_forward.dropout"] for i in (0, 1)} == {0.1}
    assert len(rates) == 1 + 2 * 4


def test_gpt2_scales_what_writes_into_the_stream() -> None:
    config = Config(vocab_size=50, d_model=64, num_heads=4, num_layers=8, architecture="decoder", init="gpt2")
    model = build(config, torch.Generator().manual_seed(0))
    assert isinstance(model, Decoder)
    layer = model.stack.layers[3]
    # standard deviation of n normals: relative error 1/sqrt(2n); n >= 4096, 6 sigma is 7 %
    assert float(layer.attention.o_proj.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.07)
    assert float(layer.attention.q_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.07)
    again = build(config, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("init", INITS)
def test_every_scheme_initialises(init: str) -> None:
    assert bool(build(Config(**SMALL, init=init))(TOKENS).isfinite().all())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"positions": "rotery"}, r"positions was 'rotery'; it must be one of sinusoidal, learned"),
        ({"d_model": 10, "num_heads": 3}, r"d_model was 10 and num_heads 3; num_heads must divide d_model"),
        ({"num_heads": 4, "num_key_value_heads": 3}, r"num_heads was 4 and num_key_value_heads 3"),
        ({"dropout": 1.0}, r"dropout was 1.0; it must lie in \[0, 1\)"),
        ({"d_model": 6, "num_heads": 2, "positions": "rotary"}, r"d_head was 3, give an even one"),
        ({"tied": True}, r"tied=True needs an output projection to the vocabulary; encoder has none"),
        ({"num_layers": 0}, r"num_layers was 0; it must be an integer >= 1"),
    ],
)
def test_a_wrong_configuration_is_refused_in_one_sentence(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config(**given)  # type: ignore[arg-type]


def test_wrong_masks_are_refused_in_one_sentence() -> None:
    model = build(Config(**SMALL))
    with pytest.raises(
        ValueError, match=r"attention_mask was torch.int64 \[2, 5\]; it must be bool \[2, 5\], True = real"
    ):
        model(TOKENS, torch.ones(2, 5, dtype=torch.long))
