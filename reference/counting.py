"""Exact parameter and FLOP counts, derived from the configuration, never measured.

With d_ff = 4 d, biases and LayerNorm an encoder layer has 12 d^2 + 13 d parameters: 4 (d^2 + d) in the attention,
8 d^2 + 5 d in the feed-forward network, 4 d in two norms. A decoder layer adds a second attention and a norm:
16 d^2 + 19 d.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from veriformer.reference.config import GATED, PLACEMENTS, Config


def linear_parameters(d_in: int, d_out: int, bias: bool) -> int:
    """Return d_in * d_out, plus d_out with a bias."""
    return d_in * d_out + (d_out if bias else 0)


def attention_parameters(
    d_model: int, num_heads: int, num_key_value_heads: int | None = None, d_head: int | None = None, bias: bool = True
) -> int:
    """Return the parameters of the projections q, k, v, o.

    For MHA with d_head = d_model / num_heads that is 4 (d^2 + d), whatever the number of heads.

    >>> attention_parameters(8, 2) == attention_parameters(8, 4) == 4 * (64 + 8)
    True
    """
    width = d_model // num_heads if d_head is None else d_head
    queries = num_heads * width
    keys = (num_heads if num_key_value_heads is None else num_key_value_heads) * width
    return (
        linear_parameters(d_model, queries, bias)
        + 2 * linear_parameters(d_model, keys, bias)
        + linear_parameters(queries, d_model, bias)
    )


def feed_forward_parameters(d_model: int, d_ff: int, activation: str = "relu", bias: bool = True) -> int:
    """Return the parameters of the feed-forward network: two matrices, three with a gate."""
    into = 2 if activation in GATED else 1
    return into * linear_parameters(d_model, d_ff, bias) + linear_parameters(d_ff, d_model, bias)


def norm_parameters(norm: str, d_model: int, bias: bool | None = None) -> int:
    """Return the parameters of one normalization: gain, and for LayerNorm (or as `bias` says) a bias."""
    if norm == "none":
        return 0
    has_bias = norm == "layer" if bias is None else bias
    return 2 * d_model if has_bias else d_model


def encoder_layer_parameters(
    d_model: int,
    num_heads: int,
    d_ff: int | None = None,
    *,
    num_key_value_heads: int | None = None,
    d_head: int | None = None,
    activation: str = "relu",
    norm: str = "layer",
    bias: bool = True,
    norm_bias: bool | None = None,
) -> int:
    """Return the parameters of one encoder (or decoder-only) layer.

    >>> encoder_layer_parameters(512, 8) == 12 * 512**2 + 13 * 512
    True
    """
    return (
        attention_parameters(d_model, num_heads, num_key_value_heads, d_head, bias)
        + feed_forward_parameters(d_model, 4 * d_model if d_ff is None else d_ff, activation, bias)
        + 2 * norm_parameters(norm, d_model, norm_bias)
    )


def decoder_layer_parameters(
    d_model: int,
    num_heads: int,
    d_ff: int | None = None,
    *,
    num_key_value_heads: int | None = None,
    d_head: int | None = None,
    activation: str = "relu",
    norm: str = "layer",
    bias: bool = True,
    norm_bias: bool | None = None,
) -> int:
    """Return the parameters of one decoder layer with attention to a memory.

    >>> decoder_layer_parameters(512, 8) == 16 * 512**2 + 19 * 512
    True
    """
    return (
        encoder_layer_parameters(
            d_model, num_heads, d_ff, num_key_value_heads=num_key_value_heads, d_head=d_head,
            activation=activation, norm=norm, bias=bias, norm_bias=norm_bias,
        )
        + attention_parameters(d_model, num_heads, num_key_value_heads, d_head, bias)
        + norm_parameters(norm, d_model, norm_bias)
    )  # fmt: skip


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by component; a tied matrix stands once, under `embedding`.

    Attributes:
        embedding: token embeddings.
        positions: learned tables and T5 biases.
        attention: self-attention of all layers.
        cross_attention: attention to the memory of all layers.
        feed_forward: of all layers.
        norms: of all layers, of queries and keys, the closing ones, and those of embeddings.
        extras: class and register tokens.
        pooling: of a classifier.
        output: projection to the vocabulary or to the classes.
    """

    embedding: int = 0
    positions: int = 0
    attention: int = 0
    cross_attention: int = 0
    feed_forward: int = 0
    norms: int = 0
    extras: int = 0
    pooling: int = 0
    output: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return sum(vars(self).values())


def count_parameters(config: Config) -> ParameterCount:
    """Return the exact number of parameters of `reference.build(config)`, by component.

    >>> sizes = dict(vocab_size=1000, d_model=128, num_heads=8, num_layers=6, norm_placement="post")
    >>> count_parameters(Config(**sizes)).total
    1317632
    """
    d, n = config.d_model, config.num_layers
    attention = attention_parameters(d, config.num_heads, config.key_value_heads, config.head_width, config.bias)
    norms_of_heads = 2 * norm_parameters(config.norm, config.head_width) if config.query_key_norm else 0
    feed_forward = feed_forward_parameters(d, config.inner_width, config.activation, config.bias)
    norm = norm_parameters(config.norm, d)
    is_pair, is_classifier = config.architecture == "encoder_decoder", config.architecture == "classifier"
    stacks = 2 if is_pair else 1
    norms_inside = n * (5 if is_pair else 2) * len(PLACEMENTS[config.norm_placement])
    closing = stacks * (config.is_closed + config.embedding_norm)
    extras = config.num_registers + (config.pooling == "cls") if is_classifier else 0
    tables = {"learned": config.max_len * d, "t5": config.num_buckets * config.num_heads}
    output = 0
    if is_classifier:
        output = linear_parameters(d, config.num_classes, config.bias)
    elif config.architecture != "encoder" and not config.tied:
        output = config.vocab_size * d
    return ParameterCount(
        embedding=config.vocab_size * d * (2 if is_pair and not config.tied else 1),
        positions=stacks * tables.get(config.positions, 0),
        attention=stacks * n * attention,
        cross_attention=n * attention if is_pair else 0,
        feed_forward=stacks * n * feed_forward,
        norms=(norms_inside + closing) * norm + n * (3 if is_pair else 1) * norms_of_heads,
        extras=extras * d,
        pooling=d if is_classifier and config.pooling == "weighted" else 0,
        output=output,
    )


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one forward pass by component: matrix products alone, a multiply-add counting 2.

    Attributes:
        projections: q, k, v, o of all attentions: 8 T d^2 a layer and sample for MHA.
        scores: q k^T and weights times v: 4 T^2 d a layer and sample (the causal half is computed too).
        feed_forward: 16 T d^2 a layer and sample for d_ff = 4 d and two matrices.
        output: projection to the vocabulary or to the classes.
    """

    projections: int = 0
    scores: int = 0
    feed_forward: int = 0
    output: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return sum(vars(self).values())


def attention_flops(config: Config, batch: int, query_len: int, key_len: int) -> tuple[int, int]:
    """Return FLOPs of the projections and of the scores of one attention, `[B, T, D]` against `[B, S, D]`."""
    width, queries = config.head_width, config.num_heads * config.head_width
    keys = config.key_value_heads * width
    projections = 2 * batch * config.d_model * (2 * query_len * queries + 2 * key_len * keys)
    return projections, 4 * batch * query_len * key_len * queries


def count_flops(config: Config, batch: int, length: int, source_length: int | None = None) -> FlopCount:
    """Return the FLOPs of one forward pass of `reference.build(config)`.

    Args:
        config: sizes and choices.
        batch: B.
        length: T (of the target for an encoder-decoder).
        source_length: S of an encoder-decoder; None: T.

    >>> flops = count_flops(Config(d_model=64, num_heads=4, num_layers=1), batch=1, length=10)
    >>> flops.total == 24 * 10 * 64**2 + 4 * 10**2 * 64
    True
    """
    matrices = 3 if config.activation in GATED else 2
    is_classifier = config.architecture == "classifier"
    extras = config.num_registers + (config.pooling == "cls") if is_classifier else 0
    tokens = length + extras

    def feed_forward(n: int) -> int:
        return 2 * batch * n * config.d_model * config.inner_width * matrices

    projections, scores = attention_flops(config, batch, tokens, tokens)
    inner = feed_forward(tokens)
    if config.architecture == "encoder_decoder":
        source = length if source_length is None else source_length
        for query_len, key_len in ((source, source), (length, source)):
            more = attention_flops(config, batch, query_len, key_len)
            projections, scores = projections + more[0], scores + more[1]
        inner += feed_forward(source)
    output = 0
    if is_classifier:
        output = 2 * batch * config.d_model * config.num_classes
        if config.pooling == "weighted":
            output += 4 * batch * length * config.d_model
    elif config.architecture != "encoder":
        output = 2 * batch * length * config.d_model * config.vocab_size
    n = config.num_layers
    return FlopCount(n * projections, n * scores, n * inner, output)


@dataclass(frozen=True)
class Published:
    """A published model: what the formulas give, and what was published.

    Attributes:
        count: exact, from the formulas.
        published: as printed in the paper.
        note: why the two differ, where they do.
    """

    count: int
    published: str
    note: str


def _stack(d: int, layers: int) -> int:
    return layers * (12 * d**2 + 13 * d)


def _pair(d: int, layers: int) -> int:
    return _stack(d, layers) + layers * (16 * d**2 + 19 * d)


PUBLISHED: Mapping[str, Published] = {
    "Transformer base": Published(
        _pair(512, 6) + 37000 * 512, "65M", "37000 shared tokens is the paper's rounded number; 65M needs about 40700"
    ),
    "Transformer big": Published(_pair(1024, 6) + 37000 * 1024, "213M", "within the rounding of the vocabulary"),
    "BERT base": Published(
        _stack(768, 12) + (30522 + 512 + 2) * 768 + 2 * 768 + 768**2 + 768,
        "110M",
        "token, position and segment tables, a norm after them, and the pooler",
    ),
    "GPT-2 small": Published(
        _stack(768, 12) + (50257 + 1024) * 768 + 2 * 768,
        "117M",
        "the paper's number is a miscount; the released weights hold 124,439,808",
    ),
    "GPT-3": Published(_stack(12288, 96) + (50257 + 2048) * 12288 + 2 * 12288, "175B", "174.6 billion, rounded"),
}
"""Published models by name, without allocating them."""
