"""The closed form of the matrix multiplications of a forward pass, from a subject's sizes and declared facts."""

from __future__ import annotations

from dataclasses import dataclass

from veriformer.properties.definitions.costs.inventory import ATTENTION, FEED_FORWARD
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject

_NEEDED = {
    "self_attention": (),
    "cross_attention": (),
    "feed_forward": ("activation",),
    "layer": ("activation",),
    "encoder": ("activation", "positions"),
    "decoder": ("activation", "positions"),
}
COUNTED = tuple(_NEEDED)
"""Kinds whose FLOPs have a closed form here."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward pass of one sample, `linear * T + square * T^2`; a multiply-add counts as two.

    Attributes:
        linear: of the projections and the feed-forward networks, a token.
        square: of the scores and the weighted sums, a pair of tokens.
        output: of the projection to the vocabulary, a token; not in `linear`.
        angles: that rotary positions may spend a token on an outer product.
    """

    linear: int
    square: int
    output: int = 0
    angles: int = 0

    def total(self, length: int) -> int:
        """Return the FLOPs of `length` tokens, without the angles."""
        return (self.linear + self.output) * length + self.square * length**2


def why_unknown(subject: Subject) -> str | None:
    """Return which facts are missing for a closed form, or None if it is known."""
    missing = [name for name in _NEEDED[subject.kind] if subject.fact(name) is None]
    if missing:
        return f"the closed form needs the facts {', '.join(missing)}; declare them"
    for name in ("activation", "positions"):
        if name in _NEEDED[subject.kind] and subject.fact(name) in ("other", "relative"):
            return f"there is no closed form for {name} = {subject.fact(name)!r}"
    if subject.kind == "layer" and subject.fact("final_norm"):
        return "a norm follows its layers, whose number is not that of one"
    if subject.router is not None:
        return "its router mixes experts, whose number no fact says"
    if subject.fact("cross_attention"):
        return "the memory has a length of its own"
    return None


def possible_flops(subject: Subject, config: DrawnConfig) -> list[Flops]:
    """Return what the closed form may be, by what is declared: with full heads, and with grouped ones if it is open."""
    found = [expected_flops(subject, config)]
    if subject.fact("grouped_queries") is None and config.num_key_value_heads != config.num_heads:
        found.append(expected_flops(subject.with_facts(grouped_queries=True), config))
    return found


def expected_weights(subject: Subject, config: DrawnConfig) -> dict[str, int]:
    """Return how many weights the matrices hold that the products are made with, by the sort of matrix."""
    groups = config.num_key_value_heads if subject.fact("grouped_queries") else config.num_heads
    layers = 1 if subject.kind not in ("encoder", "decoder") or subject.fact("shared_layers") else config.num_layers
    matrices = 3 if subject.fact("activation") == "swiglu" else 2
    attention = 2 * config.d_model**2 + 2 * config.d_model * groups * config.d_head
    found = {ATTENTION: attention, FEED_FORWARD: matrices * config.d_model * config.d_ff}
    if subject.kind in ("self_attention", "cross_attention"):
        del found[FEED_FORWARD]
    elif subject.kind == "feed_forward":
        del found[ATTENTION]
    return {sort: layers * each for sort, each in found.items()}


def expected_flops(subject: Subject, config: DrawnConfig) -> Flops:
    """Return the closed form of a subject of these sizes: 24 d^2 T + 4 d T^2 a layer at d_ff = 4d."""
    d = config.d_model
    groups = config.num_key_value_heads if subject.fact("grouped_queries") else config.num_heads
    projections = 4 * d * d + 4 * d * groups * config.d_head
    scores = 4 * config.num_heads * config.d_head
    matrices = 3 if subject.fact("activation") == "swiglu" else 2
    inner = 2 * matrices * d * config.d_ff
    if subject.kind in ("self_attention", "cross_attention"):
        return Flops(projections, scores)
    if subject.kind == "feed_forward":
        return Flops(inner, 0)
    layers = 1 if subject.kind == "layer" else config.num_layers
    angles = 2 * config.d_head * layers if subject.fact("positions") == "rotary" else 0
    output = 2 * d * config.vocab_size if subject.kind == "decoder" and subject.takes_tokens else 0
    return Flops(layers * (projections + inner), layers * scores, output, angles)
