"""Faults of the initial weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters import reference_parts
from veriformer.properties.adapters.reference_models import facts_of, forward
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.attention import MultiHeadAttention
from veriformer.reference.model import build
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import as_it_is, put
from veriformer.tests.mutants.parts import sized


def started(
    kind: str, change: Any, declares: dict[str, Any] | None = None, right: Any = as_it_is, **choices: Any
) -> Subject:
    """Return a reference model whose initial weights were altered."""
    change = change if change is as_it_is else put(change, instead_of=right)

    def make(config: DrawnConfig) -> nn.Module:
        model = build(sized(config, architecture=kind, **choices))
        with torch.no_grad():
            change(model)
        return model

    facts = facts_of(sized(DrawnConfig(), architecture=kind, **choices))
    return Subject(kind=kind, build=make, forward=forward, declares={**facts, **(declares or {})})


@fault("SC01-init", "No scale: attention starts peaked", killed_by=("init.entropy",), cause="sqrt(d_head)")
def peaked() -> Subject:
    scale = put(1.0, instead_of=None)

    def make(config: Any) -> nn.Module:
        return MultiHeadAttention(config.d_model, config.num_heads, scale=scale)

    return Subject(
        kind="self_attention", build=make, forward=reference_parts.self_attention,
        weights=reference_parts.self_attention_weights, declares={"positions": "none", "attention_scale": "1"},
    )  # fmt: skip


@fault(
    "IN-collapse",
    "Tokens collapse: the residual connections are missing",
    killed_by=("init.token-spread",),
    cause="residual connection missing",
)
def collapse() -> Subject:
    return started("encoder", as_it_is, {"residual": True}, residual=put(False, instead_of=True))


@fault("IN-default", "torch's default in place of Xavier's", killed_by=("init.xavier",), cause="torch's default")
def default() -> Subject:
    return started("encoder", as_it_is, {"init": "xavier"}, init=put("default", instead_of="xavier"))


@fault(
    "IN07",
    "The scaled initialisation is never applied",
    killed_by=("init.residual-scaling",),
    cause="the factor 1/sqrt(2N) is missing",
)
def never_applied() -> Subject:
    def change(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down.weight")):
                parameter.mul_((2 * model.config.num_layers) ** 0.5)  # type: ignore[union-attr, operator]

    return started("decoder", change, init="gpt2")


@fault(
    "IN08",
    "The scaled initialisation is applied to the wrong matrix",
    killed_by=("init.residual-scaling",),
    cause="the factor 1/sqrt(2N) is missing",
)
def wrong_matrix() -> Subject:
    def change(model: nn.Module) -> None:
        factor = (2 * model.config.num_layers) ** 0.5  # type: ignore[union-attr, operator]
        for name, parameter in model.named_parameters():
            if name.endswith("down.weight"):
                parameter.mul_(factor)
            if name.endswith("up.weight"):
                parameter.div_(factor)

    return started("decoder", change, init="gpt2")


@fault("IN-unit", "Output weights of unit variance", killed_by=("init.loss",), cause="variance")
def unit() -> Subject:
    return started("decoder", lambda m: m.output.weight.normal_(generator=torch.Generator().manual_seed(0)))


@fault(
    "IN-twice",
    "Embeddings are scaled by sqrt(d) in two places",
    killed_by=("init.embedding-scale",),
    cause="scaled twice",
)
def twice() -> Subject:
    def change(model: nn.Module) -> None:
        inner = model.embedding.tokens.forward  # type: ignore[union-attr]

        def scaled(tokens: Tensor) -> Tensor:
            return inner(tokens) * model.config.d_model**0.5  # type: ignore[union-attr, operator]

        model.embedding.tokens.forward = scaled  # type: ignore[union-attr, assignment]

    return started("encoder", change, embedding_scale=True)
