"""One configuration for every reference model: frozen, keyword-only, validated once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

ARCHITECTURES = ("encoder", "decoder", "encoder_decoder", "classifier")
POSITIONS = ("sinusoidal", "learned", "rotary", "alibi", "t5", "none")
NORMS = ("layer", "rms", "none")
PLACEMENTS: Mapping[str, tuple[str, ...]] = {
    "pre": ("in",), "post": ("out",), "sandwich": ("in", "change"), "branch": ("change",),
}  # fmt: skip
"""Where the norms of a sublayer stand: on what it takes, on what it gives, on the sum."""
GATED = ("swiglu", "geglu", "geglu_tanh")
ACTIVATIONS = ("relu", "relu_squared", "gelu", "gelu_tanh", "quick_gelu", *GATED)
POOLINGS = ("cls", "mean", "max", "weighted")
INITS = ("xavier", "gpt2", "default")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and choices of one reference Transformer.

    Attributes:
        architecture: one of `ARCHITECTURES`.
        vocab_size: tokens V.
        d_model: width D.
        num_heads: query heads H.
        num_key_value_heads: key-value heads; None: H (MHA), 1: MQA, between: GQA.
        d_head: channels of a head; None: D / H.
        d_ff: inner width F of the feed-forward network; None: 4 D.
        num_layers: layers N (of encoder and decoder each).
        max_len: rows of a learned position table; other positions take any length.
        positions: one of `POSITIONS`.
        norm: one of `NORMS`.
        norm_placement: "pre" (x + f(norm(x))), "post" (norm(x + f(x))), "sandwich" (x + norm(f(norm(x))), Gemma 2) or
            "branch" (x + norm(f(x)), OLMo 2).
        final_norm: whether a norm closes the stack; None: unless post-LN.
        norm_eps: added to the variance inside the root.
        residual: whether sublayers are wrapped in x + f(x).
        parallel: whether attention and feed-forward network take the same x: x + f(norm(x)) + g(norm(x)) (GPT-J).
        activation: one of `ACTIVATIONS`.
        bias: whether linear maps (other than the output projection to the vocabulary) have biases.
        tied: whether the output projection is the token embedding.
        embedding_scale: whether token embeddings are multiplied by sqrt(D).
        embedding_norm: whether a norm stands between the embeddings and the first layer (BERT, BLOOM).
        attention_scale: factor on q k^T; None: 1 / sqrt(d_head).
        query_key_norm: whether queries and keys are normalised head by head, before they are turned (Qwen 3).
        window: keys that a query sees to either side, its own among them; None: all.
        base: of the frequencies of sinusoidal and rotary positions.
        rotary_dim: channels of a head that rotary positions turn; None: all.
        dropout: rate at the places below that are None.
        attention_dropout: on attention weights.
        ffn_dropout: inside the feed-forward network.
        embedding_dropout: after embedding and positions.
        drop_path: rate of dropping a whole sublayer of a sample.
        pooling: of a classifier; one of `POOLINGS`.
        num_registers: register tokens of a classifier, never read.
        num_classes: classes C of a classifier.
        init: one of `INITS`.
        num_buckets: of the T5 bias.
        max_distance: of the T5 bias.
    """

    architecture: str = "encoder"
    vocab_size: int = 32
    d_model: int = 32
    num_heads: int = 4
    num_key_value_heads: int | None = None
    d_head: int | None = None
    d_ff: int | None = None
    num_layers: int = 2
    max_len: int = 128
    positions: str = "sinusoidal"
    norm: str = "layer"
    norm_placement: str = "pre"
    final_norm: bool | None = None
    norm_eps: float = 1e-5
    residual: bool = True
    parallel: bool = False
    activation: str = "relu"
    bias: bool = True
    tied: bool = False
    embedding_scale: bool = True
    embedding_norm: bool = False
    attention_scale: float | None = None
    query_key_norm: bool = False
    window: int | None = None
    base: float = 10000.0
    rotary_dim: int | None = None
    dropout: float = 0.0
    attention_dropout: float | None = None
    ffn_dropout: float | None = None
    embedding_dropout: float | None = None
    drop_path: float = 0.0
    pooling: str = "mean"
    num_registers: int = 0
    num_classes: int = 2
    init: str = "xavier"
    num_buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        _one_of("architecture", self.architecture, ARCHITECTURES)
        _one_of("positions", self.positions, POSITIONS)
        _one_of("norm", self.norm, NORMS)
        _one_of("norm_placement", self.norm_placement, PLACEMENTS)
        _one_of("activation", self.activation, ACTIVATIONS)
        _one_of("pooling", self.pooling, POOLINGS)
        _one_of("init", self.init, INITS)
        for name in ("vocab_size", "d_model", "num_heads", "num_layers", "max_len", "num_classes"):
            _at_least(name, getattr(self, name), 1)
        _at_least("num_registers", self.num_registers, 0)
        for name in ("num_key_value_heads", "d_head", "d_ff", "window", "rotary_dim"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("dropout", "attention_dropout", "ffn_dropout", "embedding_dropout", "drop_path"):
            rate = getattr(self, name)
            if rate is not None and not 0 <= rate < 1:
                raise ValueError(f"{name} was {rate}; it must lie in [0, 1)")
        if self.d_head is None and self.d_model % self.num_heads:
            raise ValueError(
                f"d_model was {self.d_model} and num_heads {self.num_heads}; num_heads must divide d_model, "
                "or give d_head"
            )
        if self.num_heads % self.key_value_heads:
            raise ValueError(
                f"num_heads was {self.num_heads} and num_key_value_heads {self.key_value_heads}; "
                "every key-value head must serve the same number of query heads"
            )
        if self.positions == "rotary" and (self.rotary_width % 2 or self.rotary_width > self.head_width):
            name = "d_head" if self.rotary_dim is None else "rotary_dim"
            raise ValueError(
                f"rotary positions turn pairs of channels; {name} was {self.rotary_width}, give an even one up to "
                f"d_head = {self.head_width}"
            )
        if self.parallel and (self.norm_placement == "post" or self.architecture == "encoder_decoder"):
            raise ValueError(
                f"parallel=True with norm_placement={self.norm_placement!r} and architecture={self.architecture!r}; "
                "sublayers side by side have no norm on each sum, and none of them attends to a memory"
            )
        if self.tied and self.architecture in ("encoder", "classifier"):
            raise ValueError(f"tied=True needs an output projection to the vocabulary; {self.architecture} has none")

    @property
    def head_width(self) -> int:
        """Channels K of one head."""
        return self.d_head if self.d_head is not None else self.d_model // self.num_heads

    @property
    def key_value_heads(self) -> int:
        """Key-value heads G."""
        return self.num_key_value_heads if self.num_key_value_heads is not None else self.num_heads

    @property
    def rotary_width(self) -> int:
        """Channels of a head that rotary positions turn."""
        return self.rotary_dim if self.rotary_dim is not None else self.head_width

    @property
    def is_closed(self) -> bool:
        """Whether a norm closes the stack."""
        return self.norm_placement != "post" if self.final_norm is None else self.final_norm

    @property
    def inner_width(self) -> int:
        """Inner width F of the feed-forward network."""
        return self.d_ff if self.d_ff is not None else 4 * self.d_model


def _one_of(name: str, value: str, options: Collection[str]) -> None:
    if value not in options:
        raise ValueError(f"{name} was {value!r}; it must be one of {', '.join(options)}")


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} was {value!r}; it must be an integer >= {least}")
