"""What a model is taken apart into: maps, norms, layers; and how it is told where it is no textbook's."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from veriformer.properties.anatomy.attention import Attention


class PartedError(Exception):
    """The model and the textbook's part; says where and in what."""


class NumberError(PartedError):
    """All is there that the textbook has, and a number is another one."""


@dataclass
class Map:
    """A linear map.

    Attributes:
        weight: `[out, in]`.
        bias: `[out]`; None: it has none.
    """

    weight: Tensor
    bias: Tensor | None


@dataclass
class NormRole:
    """A norm with its gain, bias and eps."""

    kind: str
    gain: Tensor
    bias: Tensor
    eps: float


@dataclass
class Sublayers:
    """One layer.

    Attributes:
        place: path of its attention.
        query: `[H K, D]`, head by head, as is `key` with its groups.
        scale: factor on q k^T.
        attention: as it was seen.
        activation: of its feed-forward network, `silu` gated or another.
        norms: of the attention, and of the feed-forward network.
        placement: "pre" or "post".
    """

    place: str
    query: Map
    key: Map
    value: Map
    output: Map
    scale: float
    attention: Attention
    activation: str
    up: Map
    gate: Map | None
    down: Map
    norms: tuple[NormRole, NormRole]
    placement: str


@dataclass
class Roles:
    """What a model is made of.

    Attributes:
        embedding: `[V, D]`; None: it is given embeddings.
        scale: by which its rows are multiplied.
        added: `[T, D]`: what the positions add.
        entering: the norm between embeddings and the first layer.
        layers: in order.
        closing: the norm behind the last layer.
        output: the map to the vocabulary; None: hidden states are given.
    """

    embedding: Tensor | None
    scale: float
    added: Tensor
    entering: NormRole | None = None
    layers: list[Sublayers] = field(default_factory=list)
    closing: NormRole | None = None
    output: Map | None = None
