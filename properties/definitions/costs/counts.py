"""The closed form of a subject's parameters, from its sizes and declared facts, component by component."""

from __future__ import annotations

from dataclasses import dataclass

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.counting import attention_parameters, feed_forward_parameters, norm_parameters

_ATTENTION = ("self_attention", "cross_attention")
_STACKS = ("encoder", "decoder", "encoder_decoder", "classifier")
_NEEDED = {
    **dict.fromkeys(_ATTENTION, ("bias",)),
    "norm": ("norm",),
    "feed_forward": ("bias", "activation"),
    "layer": ("bias", "activation", "norm"),
    **dict.fromkeys(_STACKS, ("bias", "activation", "norm", "positions")),
}
_TABLES_OF_ANY_SIZE = {True: ("relative",), False: ("relative", "learned")}
"""Positions whose tables have no size of their own, in whole models and in their parts."""
COUNTED = tuple(_NEEDED)
"""Kinds whose parameters have a closed form here."""


@dataclass(frozen=True)
class Component:
    """Some parameters that belong together.

    Attributes:
        name: in words.
        each: parameters of one.
        times: how many there are.
        optional: that nothing declared says whether they are there.
        usual: whether an optional one is there by convention.
    """

    name: str
    each: int
    times: int = 1
    optional: bool = False
    usual: bool = False


def why_unknown(subject: Subject) -> str | None:
    """Return which facts are missing for a closed form, or None if it is known."""
    missing = [name for name in _NEEDED[subject.kind] if subject.fact(name) is None]
    if subject.kind in ("decoder", "encoder_decoder") and subject.takes_tokens and subject.fact("tied") is None:
        missing.append("tied")
    if subject.kind in _STACKS and subject.fact("final_norm") is None and subject.fact("norm_placement") is None:
        missing.append("final_norm")
    if subject.kind == "classifier" and subject.fact("pooling") is None:
        missing.append("pooling")
    if missing:
        return f"the closed form needs the facts {', '.join(missing)}; declare them"
    for name in ("norm", "activation", "positions", "pooling"):
        if subject.fact(name) == "other":
            return f"there is no closed form for {name} = 'other'"
    if subject.kind == "layer" and subject.fact("final_norm"):
        return "a norm follows its layers, whose number is not that of one"
    if subject.kind == "layer" and subject.patches is not None:
        return "what makes its patches has parameters, whose number no fact says"
    if subject.router is not None:
        return "its router mixes experts, whose number no fact says"
    if subject.fact("shared_layers"):
        return "layers share parameters on purpose"
    if subject.fact("positions") in _TABLES_OF_ANY_SIZE[subject.kind in _STACKS]:
        return f"there is no closed form for the table of positions = {subject.fact('positions')!r}"
    if subject.kind in (*_STACKS, "layer") and subject.fact("norm_placement") == "other":
        return "there is no closed form for the norms of norm_placement = 'other'"
    return None


def expected_count(subject: Subject, config: DrawnConfig) -> list[Component]:
    """Return the components of a subject of these sizes; their sum is the exact number of parameters."""
    d, bias = config.d_model, bool(subject.fact("bias", True))
    crosses = 1 if subject.kind == "layer" and subject.fact("cross_attention") else 0
    groups = config.num_key_value_heads if subject.fact("grouped_queries") else config.num_heads
    attention = attention_parameters(d, config.num_heads, groups, None, bias)
    norm = norm_parameters(str(subject.fact("norm", "none")), d, subject.fact("norm_bias"))
    feed_forward = feed_forward_parameters(d, config.d_ff, str(subject.fact("activation", "relu")), bias)
    buckets = int(subject.fact("num_buckets", 32)) * config.num_heads
    table = Component("table of relative positions", buckets if subject.fact("positions") == "t5" else 0, optional=True)
    gains: list[Component] = []
    if subject.fact("query_key_norm"):  # of a head or of all heads, each with a bias or without; or without gains
        for of, width in (("a head", 2 * config.d_head), ("all heads", d + groups * config.d_head)):
            each = norm_parameters(str(subject.fact("norm", "rms")), width, subject.fact("norm_bias"))
            gains.append(Component(f"norms of queries and keys over {of}", each, 1 + bool(crosses), optional=True))
    if subject.kind in _ATTENTION:
        return [Component("the four projections", attention), table, *gains]
    if subject.kind == "norm":
        return [Component("the norm", norm)]
    if subject.kind == "feed_forward":
        return [Component("the feed-forward network", feed_forward)]
    if subject.kind == "layer":
        return [
            Component("attention", attention, 1 + crosses),
            Component("feed-forward network", feed_forward),
            Component("norm", norm, 2 + crosses),
            table,
            *gains,
        ]
    return _stack(subject, config, attention, feed_forward, norm)


def _stack(subject: Subject, config: DrawnConfig, attention: int, feed_forward: int, norm: int) -> list[Component]:
    d, pair, bias = config.d_model, subject.kind == "encoder_decoder", bool(subject.fact("bias"))
    layers = config.num_layers if subject.fact("stacked", True) else 1
    encodes = bool(subject.fact("encodes_source", True))
    encoders = 0 if pair and not encodes else 1
    closes = subject.fact("final_norm", subject.fact("norm_placement") == "pre")
    stacks = encoders + (1 if pair else 0)
    found = [
        Component("self-attention", attention, layers * stacks),
        Component("cross-attention", attention, layers if pair else 0),
        Component("feed-forward network", feed_forward, layers * stacks),
        Component("norm", norm, layers * (2 * encoders + (3 if pair else 0))),
        Component("closing norm", norm, stacks if closes else 0),
    ]
    if subject.fact("query_key_norm"):  # head by head, with or without gains of its own
        each = 2 * norm_parameters(str(subject.fact("norm")), config.d_head, subject.fact("norm_bias"))
        found.append(Component("norms of queries and keys", each, layers * (stacks + pair), optional=True, usual=True))
    tables = {
        "learned": int(subject.fact("max_len", config.max_len)) * d,
        "t5": int(subject.fact("num_buckets", 32)) * config.num_heads,
    }
    found.append(Component("position table", tables.get(str(subject.fact("positions")), 0), stacks))
    if subject.takes_tokens:
        if subject.fact("norm_placement") == "post":  # BERT and BART norm what is embedded, too
            found.append(Component("norm of the embeddings", norm, stacks, optional=True))
        tied = bool(subject.fact("tied", False))
        found.append(Component("token embedding", config.vocab_size * d))
        if pair:  # one table for both, as Vaswani et al. have it, or one of its own for the source
            found.append(Component("source's token embedding", config.vocab_size * d, optional=True, usual=not tied))
        if subject.kind in ("decoder", "encoder_decoder"):
            found.append(Component("output projection", config.vocab_size * d, 0 if tied else 1))
            known = subject.fact("output_bias")
            times = 1 if known or (known is None and bias) else 0
            found.append(Component("output bias", config.vocab_size, times, optional=known is None))
        elif subject.kind == "encoder":  # of a masked language model; one that gives hidden states has neither
            found.append(Component("output projection", config.vocab_size * d, 0 if tied else 1, optional=True))
            found.append(Component("output bias", config.vocab_size, optional=True))
    if subject.kind == "classifier":
        found.append(Component("extra token", d, int(subject.fact("extra_tokens", 0))))
        weighted = 1 if subject.fact("pooling") == "weighted" else 0
        found.append(Component("pooling weights", d, weighted))
        found.append(Component("pooling bias", 1, weighted, optional=True))
        found.append(Component("class projection", d * config.num_classes))
        known = subject.fact("output_bias")
        times = 1 if known or (known is None and bias) else 0
        found.append(Component("class bias", config.num_classes, times, optional=known is None, usual=True))
    return found


def possible_counts(subject: Subject, config: DrawnConfig) -> list[list[Component]]:
    """Return what the components may be, by what is declared: with full heads, and with grouped ones if it is open."""
    found = [expected_count(subject, config)]
    if subject.fact("grouped_queries") is None and config.num_key_value_heads != config.num_heads:
        found.append(expected_count(subject.with_facts(grouped_queries=True), config))
    return found


def nearest_count(possible: list[list[Component]], got: int) -> list[Component]:
    """Return the components that make up a count, with or without those that are optional; else the usual ones."""
    for components in possible:
        chosen: list[list[Component]] = [[]]
        for c in components:
            more = [[*left, c] for left in chosen]
            chosen = chosen + more if c.optional and c.each and c.times else more
        if exact := next((found for found in chosen if total(found) == got), None):
            return exact
    usual = [[c for c in components if c.usual or not c.optional] for components in possible]
    return min(usual, key=lambda components: abs(total(components) - got))


def fewest(components: list[Component]) -> int:
    """Return the sum without what is optional."""
    return total([c for c in components if not c.optional])


def total(components: list[Component]) -> int:
    """Return the sum."""
    return sum(c.each * c.times for c in components)
