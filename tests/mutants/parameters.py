"""Faults of parameters: shared, missing, hidden, unused, untied."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from veriformer.properties.adapters.reference_models import facts_of, forward
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.config import Config
from veriformer.reference.model import build
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import as_it_is, put
from veriformer.tests.mutants.parts import model, sized

_FACTS = {"bias": True, "norm": "layer", "activation": "relu", "norm_placement": "pre"}


@fault(
    "IN01",
    "[layer]*n shares one instance",
    killed_by=("parameters.exact-count",),
    cause="one module with one set of weights",
)
def shared_layers() -> Subject:
    def change(built: nn.Module) -> None:
        built.stack.layers = nn.ModuleList([built.stack.layers[0]] * len(built.stack.layers))

    return model(change, _FACTS)


@fault(
    "NM08",
    "One LayerNorm instance shared by two sublayers",
    killed_by=("parameters.exact-count",),
    cause="norm",
)
def shared_norm() -> Subject:
    def change(built: nn.Module) -> None:
        for layer in built.stack.layers:
            layer.around_feed_forward.norm_in = layer.around_attention.norm_in

    return model(change, _FACTS)


@fault(
    "FF02",
    "'swiglu' silently maps to plain SiLU",
    killed_by=("parameters.exact-count",),
)
def not_gated() -> Subject:
    return model(as_it_is, {**_FACTS, "activation": "swiglu"}, activation="relu")


@fault(
    "parameters-bias",
    "Declared without biases, built with them",
    killed_by=("parameters.exact-count",),
    cause="has a bias",
)
def with_biases() -> Subject:
    return model(as_it_is, {**_FACTS, "bias": False})


@fault(
    "IN05",
    "Python list hides layers from parameters()",
    killed_by=("parameters.registered", "parameters.exact-count"),
    cause="another output each time|dropout acts in eval|missing, shared or tied",
)
def hidden_layers() -> Subject:
    class Hidden(nn.Module):
        def __init__(self, layers: Any) -> None:
            super().__init__()
            self.hidden = list(layers)

        def __iter__(self) -> Any:
            return iter(self.hidden)

    def change(built: nn.Module) -> None:
        built.stack.layers = Hidden(built.stack.layers)

    return model(change, _FACTS)


@fault(
    "tied-broken",
    "The embedding is given a new parameter after the output projection was tied to the old one",
    killed_by=("parameters.tied",),
    cause="was given a new one: the tie was made before this",
)
def tie_before_weights() -> Subject:
    def change(built: nn.Module) -> None:
        tokens = built.embedding.tokens
        built.output.weight = tokens.weight
        tokens.weight = put(nn.Parameter(torch.randn_like(tokens.weight) * 0.02), instead_of=tokens.weight)

    return model(change, {**_FACTS, "tied": True}, architecture="decoder", tied=True)


@fault(
    "tied-copy",
    "The output projection is a copy of the embedding, not the embedding",
    killed_by=("parameters.tied", "parameters.exact-count"),
    cause="output projection is there besides",
)
def copied() -> Subject:
    def change(built: nn.Module) -> None:
        built.output.weight = nn.Parameter(built.embedding.tokens.weight.detach().clone())

    return model(change, {**_FACTS, "tied": True}, architecture="decoder", tied=True)


@fault(
    "parameters-unused",
    "A projection that nothing reads",
    killed_by=("parameters.all-used", "parameters.exact-count"),
    cause="besides",
)
def unused() -> Subject:
    def change(built: nn.Module) -> None:
        built.extra = nn.Linear(4, 4)

    return model(change, _FACTS)


@fault(
    "parameters-cap",
    "The feed-forward width is capped",
    killed_by=("parameters.paper-table",),
    cause="parameters, the formula gives",
)
def capped() -> Subject:
    cap = put(500, instead_of=10**9)

    def make(config: Any) -> nn.Module:
        return build(
            Config(
                vocab_size=config.vocab_size,
                d_model=config.d_model,
                num_heads=config.num_heads,
                num_layers=config.num_layers,
                max_len=config.max_len,
                d_ff=min(config.d_ff, cap),
            )
        )

    return Subject(
        kind="encoder", build=make, forward=forward, declares={**_FACTS, "causal": False, "positions": "sinusoidal"}
    )


@fault(
    "EM06",
    "The count takes the tied table away, and then the output projection, which is the same matrix",
    killed_by=("parameters.tied",),
    cause="",
)
def taken_away_twice() -> Subject:
    again = put(1, instead_of=0)

    def change(built: nn.Module) -> None:
        whole, table = sum(p.numel() for p in built.parameters()), built.embedding.tokens.weight.numel()
        built.num_parameters = lambda: whole - table - again * table

    def make(config: Any) -> nn.Module:
        built = build(sized(config, architecture="decoder", tied=True))
        change(built)
        return built

    facts = facts_of(sized(DrawnConfig(), architecture="decoder", tied=True))
    return Subject(kind="decoder", build=make, forward=forward, declares=facts)


@fault(
    "parameters-detached",
    "A detach at the end of the forward, left there after an evaluation: nothing is trained",
    killed_by=("parameters.all-used",),
    cause="detaches what it gives",
)
def detached() -> Subject:
    return model(lambda built: built.register_forward_hook(lambda m, inputs, output: output.detach()))
