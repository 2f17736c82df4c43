"""Faults of the residual stream and of the stack of layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.reference.blocks import EncoderLayer, NoSkip, Sublayer
from veriformer.reference.config import Config
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import as_it_is, put
from veriformer.tests.mutants.parts import SelfAttention, model, self_attention


def reference_layer(placement: str, change: Any, **facts: Any) -> Subject:
    change = change if change is as_it_is else put(change, instead_of=as_it_is)

    def build(c: Any) -> nn.Module:
        made = EncoderLayer(Config(d_model=c.d_model, num_heads=c.num_heads, d_ff=c.d_ff, norm_placement=placement))
        change(made)
        return made

    return Subject(
        kind="layer",
        build=build,
        forward=lambda m, x, attention_mask=None: m(x, attention_mask)[0],
        declares={
            "causal": False,
            "positions": "none",
            "norm": "layer",
            "norm_placement": placement,
            "residual": True,
            **facts,
        },
    )


class NormalisedSkip(Sublayer):
    """The skip starts behind the norm."""

    def leave(self, x: Tensor, change: Tensor) -> Tensor:
        return self.norm_in(x) + change


def each_sublayer(change: Any) -> Any:
    def alter(layer: EncoderLayer) -> None:
        for part in (layer.around_attention, layer.around_feed_forward):
            change(part)

    return alter


@fault(
    "RS01",
    "Residual adds the normalised input",
    killed_by=("residual.identity",),
    cause="the skip starts behind the norm",
)
def normalised_skip() -> Subject:
    return reference_layer("pre", each_sublayer(lambda part: setattr(part, "__class__", NormalisedSkip)))


@fault("RS02", "Residual missing in one branch", killed_by=("residual.identity",), cause="there is no residual")
def one_branch() -> Subject:
    return reference_layer("pre", lambda layer: setattr(layer.around_feed_forward, "skip", NoSkip()))


@fault(
    "NM05",
    "norm_first is not honoured",
    killed_by=("residual.placement", "residual.identity"),
    cause="post-LN",
)
def not_honoured() -> Subject:
    return reference_layer(put("post", instead_of="pre"), as_it_is, norm_placement="pre")


@fault("residual-post-raw", "Declared post-LN, built pre-LN", killed_by=("residual.placement",), cause="pre-LN")
def raw_stream() -> Subject:
    return reference_layer(put("pre", instead_of="post"), as_it_is, norm_placement="post")


@fault(
    "residual-detached",
    "The skip is cut off from the gradient",
    killed_by=("residual.jacobian",),
    cause="cuts the graph",
)
def detached() -> Subject:
    class Detached(nn.Module):
        def forward(self, x: Tensor, change: Tensor) -> Tensor:
            return x.detach() + change

    return reference_layer("pre", each_sublayer(lambda part: setattr(part, "skip", Detached())))


@fault(
    "attention-skip",
    "The attention module adds its input",
    killed_by=("residual.rank-collapse",),
    cause="adds its input",
)
def inner_skip() -> Subject:
    class Skipping(SelfAttention):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return x + super().forward(x, attention_mask)

    return self_attention(Skipping)


@fault(
    "residual-none",
    "No skip at all, declared to have one",
    killed_by=("residual.depth-gradient",),
    cause="residual connection missing",
)
def no_skip() -> Subject:
    def change(built: nn.Module) -> None:
        for layer in built.stack.layers:
            layer.around_attention.skip = layer.around_feed_forward.skip = NoSkip()

    return model(change, {"residual": True}, init="gpt2")


@fault(
    "IN02",
    "The loop applies one layer again and again",
    killed_by=("layer.composition",),
    cause="not connected|layer 0 is applied again",
)
def one_layer() -> Subject:
    def change(built: nn.Module) -> None:
        class Loop(nn.ModuleList):
            def __iter__(self) -> Any:
                return iter([self[0]] * len(self))

        built.stack.layers = Loop(built.stack.layers)

    return model(change)


@fault("layers-reversed", "The layers run from last to first", killed_by=("layer.composition",), cause="reversed")
def backwards() -> Subject:
    def change(built: nn.Module) -> None:
        class Backwards(nn.ModuleList):
            def __iter__(self) -> Any:
                return iter([self[i] for i in range(len(self) - 1, -1, -1)])

        built.stack.layers = Backwards(built.stack.layers)

    return model(change)


@fault("layers-restarted", "Every layer gets the embeddings", killed_by=("layer.composition",), cause="not connected")
def restarted() -> Subject:
    def change(built: nn.Module) -> None:
        first: list[Tensor] = []

        def remember(module: nn.Module, args: Any) -> None:
            first[:] = [args[0]]

        def again(module: nn.Module, args: Any) -> Any:
            return (first[0], *args[1:])

        built.stack.layers[0].register_forward_pre_hook(remember)
        for layer in list(built.stack.layers)[1:]:
            layer.register_forward_pre_hook(again)

    return model(change)
