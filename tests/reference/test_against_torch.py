"""The reference against torch.nn with copied weights: values and gradients, with masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.reference.attention import MultiHeadAttention, attention, softmax
from veriformer.reference.blocks import DecoderLayer, EncoderLayer
from veriformer.reference.config import Config
from veriformer.reference.normalization import LayerNorm, RMSNorm

# Both sides run in float64, where two orders of summation over at most 48 terms, through at most a dozen operations,
# differ by a few hundred eps of 2e-16; a wrong formula differs by 1e-3 and more.
CLOSE = {"rtol": 1e-11, "atol": 1e-11}
B, T, S, D, H, F = 3, 5, 7, 12, 3, 20


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def copy_attention(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    with torch.no_grad():
        for number, name in enumerate("qkv"):
            rows = slice(number * D, (number + 1) * D)
            getattr(ours, f"{name}_proj").weight.copy_(theirs.in_proj_weight[rows])
            getattr(ours, f"{name}_proj").bias.copy_(theirs.in_proj_bias[rows])
        ours.o_proj.weight.copy_(theirs.out_proj.weight)
        ours.o_proj.bias.copy_(theirs.out_proj.bias)


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)


def same_with_gradients(ours: Tensor, theirs: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, **CLOSE)
    probe = normal(*ours.shape)
    for a, b in zip(
        torch.autograd.grad((ours * probe).sum(), inputs),
        torch.autograd.grad((theirs * probe).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, **CLOSE)


def padding() -> Tensor:
    mask = torch.ones(B, S, dtype=torch.bool)
    mask[0, 4:] = False
    mask[2, 1:] = False
    return mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_that_of_torch(causal: bool, masked: bool) -> None:
    q, k, v = (normal(B, H, n, 4).requires_grad_() for n in (T, S, S))
    mask = padding()[:, None, None].expand(B, 1, T, S) if masked else None
    allowed = torch.ones(T, S, dtype=torch.bool).tril(S - T) if causal else torch.ones(T, S, dtype=torch.bool)
    both = allowed if mask is None else mask & allowed
    ours, weights = attention(q, k, v, attention_mask=mask, causal=causal)
    theirs = functional.scaled_dot_product_attention(q, k, v, attn_mask=both)
    same_with_gradients(ours, theirs, q, k, v)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, T, dtype=torch.float64), **CLOSE)


def test_grouped_heads_are_those_of_torch() -> None:
    q, k, v = normal(B, 6, T, 4), normal(B, 2, S, 4), normal(B, 2, S, 4)
    theirs = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v)[0], theirs, **CLOSE)


def test_softmax_is_that_of_torch_and_zero_for_empty_rows() -> None:
    scores = normal(4, 6)
    scores[0, 2] = -torch.inf
    torch.testing.assert_close(softmax(scores), scores.softmax(-1), **CLOSE)
    torch.testing.assert_close(softmax(scores, dim=0)[:, 0], scores.softmax(0)[:, 0], **CLOSE)
    empty = torch.full((1, 6), -torch.inf, dtype=torch.float64, requires_grad=True)
    weights = softmax(empty)
    assert torch.equal(weights, torch.zeros(1, 6, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(weights.sum(), empty)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("cross", [False, True])
def test_multi_head_attention_is_that_of_torch(cross: bool) -> None:
    theirs = nn.MultiheadAttention(D, H, batch_first=True, dtype=torch.float64)
    randomise(theirs)
    ours = MultiHeadAttention(D, H).double()
    copy_attention(ours, theirs)
    x, memory = normal(B, T, D).requires_grad_(), normal(B, S, D).requires_grad_()
    if cross:
        mask = padding()
        output, weights = ours(x, memory, attention_mask=mask)
        expected, expected_weights = theirs(x, memory, memory, key_padding_mask=~mask, average_attn_weights=False)
        same_with_gradients(output, expected, x, memory)
    else:
        mask = padding()[:, :T]
        mask[:, 0] = True
        output, weights = ours(x, attention_mask=mask)
        expected, expected_weights = theirs(x, x, x, key_padding_mask=~mask, average_attn_weights=False)
        same_with_gradients(output, expected, x)
    torch.testing.assert_close(weights, expected_weights, **CLOSE)


def copy_layer(ours: nn.Module, theirs: nn.Module, pre: bool) -> None:
    norm = "norm_in" if pre else "norm_out"
    places = ["around_attention", "around_feed_forward"]
    copy_attention(ours.attention, theirs.self_attn)  # type: ignore[arg-type]
    if isinstance(ours, DecoderLayer):
        copy_attention(ours.cross_attention, theirs.multihead_attn)  # type: ignore[arg-type]
        places = ["around_attention", "around_cross_attention", "around_feed_forward"]
    ours.feed_forward.up.load_state_dict(theirs.linear1.state_dict())  # type: ignore[union-attr]
    ours.feed_forward.down.load_state_dict(theirs.linear2.state_dict())  # type: ignore[union-attr]
    for number, place in enumerate(places, 1):
        getattr(getattr(ours, place), norm).load_state_dict(getattr(theirs, f"norm{number}").state_dict())


def config(pre: bool, activation: str = "relu") -> Config:
    return Config(
        d_model=D, num_heads=H, d_ff=F, activation=activation, norm_placement="pre" if pre else "post", dropout=0.0
    )


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("causal", [False, True])
def test_encoder_layer_is_that_of_torch(pre: bool, activation: str, causal: bool) -> None:
    theirs = nn.TransformerEncoderLayer(D, H, F, 0.0, activation, batch_first=True, norm_first=pre, dtype=torch.float64)
    randomise(theirs)
    ours = EncoderLayer(config(pre, activation), causal=causal).double()
    copy_layer(ours, theirs, pre)
    x = normal(B, T, D).requires_grad_()
    mask = padding()[:, :T]
    blocked = torch.ones(T, T, dtype=torch.bool).triu(1) if causal else None
    expected = theirs(x, src_mask=blocked, src_key_padding_mask=~mask)
    same_with_gradients(ours(x, mask)[0], expected, x)


@pytest.mark.parametrize("pre", [False, True])
def test_decoder_layer_is_that_of_torch(pre: bool) -> None:
    theirs = nn.TransformerDecoderLayer(D, H, F, 0.0, batch_first=True, norm_first=pre, dtype=torch.float64)
    randomise(theirs)
    ours = DecoderLayer(config(pre)).double()
    copy_layer(ours, theirs, pre)
    x, memory = normal(B, T, D).requires_grad_(), normal(B, S, D).requires_grad_()
    mask = padding()
    blocked = torch.ones(T, T, dtype=torch.bool).triu(1)
    expected = theirs(x, memory, tgt_mask=blocked, memory_key_padding_mask=~mask)
    same_with_gradients(ours(x, memory, None, mask)[0], expected, x, memory)


def test_norms_are_those_of_torch() -> None:
    x = normal(B, T, D).requires_grad_()
    for ours, theirs in (
        (LayerNorm(D, 1e-3), nn.LayerNorm(D, 1e-3, dtype=torch.float64)),
        (RMSNorm(D, 1e-3), nn.RMSNorm(D, 1e-3, dtype=torch.float64)),
    ):
        ours = ours.double()
        randomise(theirs)
        ours.load_state_dict(theirs.state_dict())
        same_with_gradients(ours(x), theirs(x), x)
