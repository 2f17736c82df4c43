"""Faults in one layer of a whole model, which the layers around it hide: norms, feed-forward networks, sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.subject.subject import Subject
from veriformer.reference.blocks import EncoderLayer, NoSkip, Skip
from veriformer.reference.feedforward import GatedFeedForward
from veriformer.reference.normalization import LayerNorm, RMSNorm
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.parts import model

_PRE = {"norm": "layer", "norm_placement": "pre", "final_norm": True}


def _flat_gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(2**0.5 / torch.pi * (x + 0.044715 * x**3)))


@fault(
    "activation-gelu-constant",
    "The tanh form of GELU has sqrt(2) / pi in the place of sqrt(2 / pi)",
    killed_by=("anatomy.feed-forward",),
    cause="tanh(0.4502",
)
def gelu_with_another_constant() -> Subject:
    def change(built: nn.Module) -> None:
        for number in range(len(built.stack.layers)):
            _activation(number, _flat_gelu)(built)

    return model(change, {"activation": "gelu"}, activation="gelu")


@fault(
    "anatomy-final-rms",
    "The final norm is an RMSNorm in a model of LayerNorms",
    killed_by=("anatomy.norm",),
    cause="it is RMSNorm, not LayerNorm|the formula of stack.final_norm is rms",
)
def final_rms() -> Subject:
    def change(built: Any) -> None:
        built.stack.final_norm = RMSNorm(built.config.d_model)

    return model(change, _PRE, architecture="decoder")


@fault(
    "anatomy-unbiased",
    "One norm divides by d - 1",
    killed_by=("anatomy.norm",),
    cause="stack.layers.1.around_feed_forward.norm_in: the variance is divided by d - 1",
)
def unbiased() -> Subject:
    class Unbiased(LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            centred = x - x.mean(-1, keepdim=True)
            return self.weight * centred / (x.var(-1, keepdim=True) + self.eps).sqrt() + self.bias

    return model(lambda m: setattr(m.stack.layers[1].around_feed_forward.norm_in, "__class__", Unbiased), _PRE)


@fault(
    "anatomy-eps",
    "One norm adds eps to the root and not to the variance",
    killed_by=("anatomy.norm",),
    cause="is added to the standard deviation, outside the root",
)
def eps_outside() -> Subject:
    class Outside(RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)

    return model(
        lambda m: setattr(m.stack.layers[0].around_attention.norm_in, "__class__", Outside),
        {"norm": "rms", "norm_placement": "pre"},
        norm="rms",
    )


@fault(
    "anatomy-raw-keys",
    "In one layer of a pre-LN encoder queries alone are normalised",
    killed_by=("anatomy.norm",),
    cause="in stack.layers.1.attention the keys take what was not normalised",
)
def raw_keys() -> Subject:
    class Raw(EncoderLayer):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None, *given: Any) -> tuple[Tensor, Tensor]:
            attended, weights = self.attention(self.around_attention.enter(x), x, attention_mask=attention_mask)
            x = self.around_attention.leave(x, attended)
            return self.around_feed_forward.leave(x, self.feed_forward(self.around_feed_forward.enter(x))), weights

    return model(lambda m: setattr(m.stack.layers[1], "__class__", Raw), _PRE)


@fault(
    "anatomy-no-final-norm",
    "A final norm is declared, and none is there",
    killed_by=("anatomy.norm",),
    cause="no norm follows the last layer",
)
def no_final_norm() -> Subject:
    return model(lambda m: setattr(m.stack, "final_norm", nn.Identity()), _PRE, architecture="decoder")


@fault(
    "anatomy-one-norm-more",
    "A post-LN encoder ends in one norm more than its last layer's own, and none is declared",
    killed_by=("anatomy.norm",),
    cause="1 norm follows the last layer",
)
def one_norm_more() -> Subject:
    def change(built: Any) -> None:
        built.stack.final_norm = LayerNorm(built.config.d_model)

    facts = {"norm": "layer", "norm_placement": "post", "final_norm": False}
    return model(change, facts, norm_placement="post")


def _activation(number: int, function: Any) -> Any:
    def change(built: Any) -> None:
        built.stack.layers[number].feed_forward.activation = function

    return change


@fault(
    "anatomy-gelu",
    "GELU stands in a decoder that is declared to have ReLU",
    killed_by=("anatomy.feed-forward",),
    cause="feed_forward.down is gelu",
)
def gelu_for_relu() -> Subject:
    def change(built: Any) -> None:
        for number in range(len(built.stack.layers)):
            _activation(number, functional.gelu)(built)

    return model(change, {"activation": "relu"}, architecture="decoder")


@fault(
    "anatomy-linear",
    "One layer has no activation at all",
    killed_by=("anatomy.feed-forward",),
    cause="in stack.layers.1.feed_forward.down is none at all",
)
def no_activation() -> Subject:
    return model(_activation(1, nn.Identity()), {"activation": "relu"})


@fault(
    "anatomy-gelu-tanh",
    "One layer has the tanh form of GELU for the exact one",
    killed_by=("anatomy.feed-forward",),
    cause="in stack.layers.0.feed_forward.down is gelu_tanh",
)
def gelu_by_tanh() -> Subject:
    change = _activation(0, torch.nn.GELU(approximate="tanh"))
    return model(change, {"activation": "gelu"}, architecture="decoder", activation="gelu")


@fault(
    "anatomy-sigmoid-gate",
    "The gate of one SwiGLU is a sigmoid: it is a GLU",
    killed_by=("anatomy.feed-forward",),
    cause="in stack.layers.1.feed_forward.down is sigmoid, gated",
)
def sigmoid_gate() -> Subject:
    class Gated(GatedFeedForward):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.gate(x).sigmoid() * self.up(x))  # type: ignore[no-any-return]

    return model(
        lambda m: setattr(m.stack.layers[1].feed_forward, "__class__", Gated),
        {"activation": "swiglu"},
        architecture="decoder",
        activation="swiglu",
    )


def _skip(number: int, part: str, stream: float, branch: float) -> Any:
    class Weighing(Skip):
        def forward(self, x: Tensor, change: Tensor) -> Tensor:
            return stream * x + branch * change

    return lambda m: setattr(getattr(m.stack.layers[number], part), "skip", Weighing())


@fault(
    "anatomy-lost-stream",
    "The last layer's feed-forward network has no residual connection",
    killed_by=("anatomy.residual",),
    cause="the residual connection around stack.layers.1.feed_forward.down is missing",
)
def lost_stream() -> Subject:
    return model(
        lambda m: setattr(m.stack.layers[1].around_feed_forward, "skip", NoSkip()), _PRE, architecture="decoder"
    )


@fault(
    "anatomy-half-branch",
    "What one feed-forward network gives is halved",
    killed_by=("anatomy.residual",),
    cause="what it gives is taken 0.5 times behind stack.layers.1.feed_forward.down (1 of 4 sums)",
)
def half_branch() -> Subject:
    return model(_skip(1, "around_feed_forward", 1.0, 0.5), {"norm_placement": "pre"}, architecture="decoder")


@fault(
    "anatomy-double-stream",
    "The stream is added twice behind one attention",
    killed_by=("anatomy.residual",),
    cause="the stream is taken 2 times behind stack.layers.0.attention.o_proj (1 of 4 sums)",
)
def double_stream() -> Subject:
    return model(_skip(0, "around_attention", 2.0, 1.0), {"norm": "layer", "norm_placement": "pre"})
