"""Norms, activations, residual sums and what enters, told by their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.anatomy.entering import embedding_factor, first_rows, position_steps, sinusoid_misfit
from veriformer.properties.anatomy.feed_forward import between_linear_maps
from veriformer.properties.anatomy.norms import held, is_norm, measured_gain, norm_calls, norms_at_the_end
from veriformer.properties.anatomy.residual import residual_sums
from veriformer.properties.anatomy.traced import Traced, traced
from veriformer.properties.definitions.sinusoids import closed_form

B, T, D = 5, 7, 8


def seen(model: nn.Module, x: Tensor | None = None) -> Traced:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model = model.double()
    x = torch.randn(B, T, D, dtype=torch.float64) if x is None else x
    return traced(model, lambda: model(x), B, 1e-6)


class Network(nn.Module):
    def __init__(self, activation: Any, gated: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.activation, self.gated = nn.Linear(D, 20), nn.Linear(20, D), activation, gated
        self.gate = nn.Linear(D, 20)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.activation(self.up(x))
        return self.down(inner * self.gate(x) if self.gated else inner)


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (torch.relu, "relu"),
        (functional.gelu, "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), "gelu"),
        (lambda x: x.clamp(min=0) ** 2, "relu_squared"),
        (nn.Identity(), "identity"),
    ],
)
def test_an_activation_is_told_by_what_it_does(activation: Any, name: str) -> None:
    (one,) = between_linear_maps(seen(Network(activation)))
    assert (one.place, one.activation, one.is_gated) == ("down", name, False)
    assert (one.inner, one.width, one.outer) == (D, 20, D)


def test_a_gate_is_told_from_what_it_gates() -> None:
    (one,) = between_linear_maps(seen(Network(functional.silu, gated=True)))
    assert (one.activation, one.is_gated) == ("silu", True)


def test_an_unknown_activation_is_none_of_the_known() -> None:
    assert not between_linear_maps(seen(Network(torch.sin)))


def test_the_two_forms_of_gelu_are_told_apart_in_float32() -> None:
    for approximate in ("none", "tanh"):
        model = Network(nn.GELU(approximate))
        x = torch.randn(B, T, D)
        (one,) = between_linear_maps(traced(model, lambda m=model, x=x: m(x), B, 1e-4))
        assert one.activation == ("gelu" if approximate == "none" else "gelu_tanh")


class FromOneNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(D)), 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * (1 + self.weight)


class Handed(nn.LayerNorm):
    """A norm by its class alone."""


@pytest.mark.parametrize(
    ("norm", "kind", "eps"),
    [(nn.LayerNorm(D, 1e-4), "layer", 1e-4), (nn.RMSNorm(D, 1e-3), "rms", 1e-3), (FromOneNorm(), "rms", 1e-3),
     (Handed(D), "layer", 1e-5)],
)  # fmt: skip
def test_a_norm_is_told_by_what_it_does(norm: nn.Module, kind: str, eps: float) -> None:
    (call,) = norm_calls(seen(nn.Sequential(norm)))
    assert is_norm(norm)
    assert (call.kind, call.eps, call.place) == (kind, eps, "0")
    more = 1 if isinstance(norm, FromOneNorm) else 0
    assert torch.allclose(measured_gain(call), held(call)[0] + more)


def test_a_second_vector_of_a_norm_is_its_bias() -> None:
    class LayerNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_2, self.b_2 = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

        def forward(self, x: Tensor) -> Tensor:
            return self.a_2 * (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) + self.b_2

    norm = LayerNorm()
    (call,) = norm_calls(seen(nn.Sequential(norm)))
    gain, bias = held(call)
    assert torch.equal(gain, norm.a_2)
    assert torch.equal(bias, norm.b_2)
    assert torch.allclose(measured_gain(call) / gain, torch.tensor(((D - 1) / D) ** 0.5, dtype=torch.float64))


class Block(nn.Module):
    """x -> a x + b W norm(x), then as many norms and an output."""

    def __init__(self, stream: float = 1.0, branch: float = 1.0, norms: int = 1) -> None:
        super().__init__()
        self.norm, self.map, self.stream, self.branch = nn.LayerNorm(D), nn.Linear(D, D), stream, branch
        self.last = nn.Sequential(*(nn.LayerNorm(D) for _ in range(norms)))
        self.head = nn.Linear(D, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.stream * x + self.branch * self.map(self.norm(x))))


@pytest.mark.parametrize(("stream", "branch"), [(1.0, 1.0), (1.0, 0.5), (2.0, 1.0), (1.4, 1.0), (1.0, -1.0)])
def test_the_factors_of_a_sum_are_read_off(stream: float, branch: float) -> None:
    (one,) = residual_sums(seen(Block(stream, branch)), D)
    assert (one.place, one.stream, one.branch) == ("map", pytest.approx(stream), pytest.approx(branch))


def test_a_stream_that_was_multiplied_elsewhere_is_taken_once() -> None:
    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0 * (x / 0.03).sum()

    (one,) = residual_sums(seen(Scaled()), D)
    assert one.stream == pytest.approx(1)


def test_a_branch_below_rounding_says_nothing() -> None:
    assert not residual_sums(seen(Block(1.0, 1e-12)), D)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_norms_behind_the_last_sum_are_counted(count: int) -> None:
    assert norms_at_the_end(seen(Block(norms=count)), D) == count


def test_what_follows_the_last_sum_otherwise_is_not_counted() -> None:
    class Squashed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.head((x + self.map(x)).tanh())

    assert norms_at_the_end(seen(Squashed()), D) is None


class Entering(nn.Module):
    def __init__(self, factor: float, first: int = 0) -> None:
        super().__init__()
        self.tokens, self.table, self.map = nn.Embedding(11, D), nn.Embedding(20, D), nn.Linear(D, D)
        self.factor, self.first = factor, first

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1]) + self.first
        return self.map(self.factor * self.tokens(tokens) + self.table(at))


@pytest.mark.parametrize("factor", [1.0, D**0.5, 0.5])
def test_the_factor_of_embeddings_is_read_off_beside_positions(factor: float) -> None:
    tokens = torch.randint(0, 11, (B, T), generator=torch.Generator().manual_seed(0))
    found = embedding_factor(seen(Entering(factor), tokens))
    assert found is not None
    assert found[0] == pytest.approx(factor)
    assert found[1] == "tokens"


@pytest.mark.parametrize("first", [0, 2])
def test_the_row_of_the_first_position_is_found(first: int) -> None:
    model = Entering(2.0, first)
    trace = seen(model, torch.arange(B)[:, None].expand(B, T))
    assert first_rows(trace, model, T, D) == [(first, "table.weight")]


def test_sinusoids_are_told_by_base_and_layout() -> None:
    class Sines(Entering):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.map(self.tokens(tokens) + closed_form(tokens.shape[1], D, 1e3, "halves"))

    (steps,) = position_steps(seen(Sines(1.0), torch.arange(B)[:, None].expand(B, T)), T, D)
    assert sinusoid_misfit(steps, D, 1e3, "halves") < 1e-9
    assert sinusoid_misfit(steps, D, 1e3, "") < 1e-9
    assert min(sinusoid_misfit(steps, D, 1e4, ""), sinusoid_misfit(steps, D, 1e3, "interleaved")) > 1e-2
