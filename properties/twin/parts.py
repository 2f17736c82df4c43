"""What a model is taken apart into: maps, norms, layers; and how it is told where it is no textbook's."""

from __future__ import annotations

from dataclasses import dataclass

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
    """A norm with its gain, bias and eps.

    Attributes:
        when: number of values that were made before it ended: which call it is.
    """

    kind: str
    gain: Tensor
    bias: Tensor
    eps: float
    when: int


@dataclass
class Attending:
    """One attention with its projections.

    Attributes:
        place: its path.
        query: `[H K, D]`, head by head, as is `key` with its groups.
        scale: factor on q k^T.
        seen: as it was recognised.
        norm: around it.
    """

    place: str
    query: Map
    key: Map
    value: Map
    output: Map
    scale: float
    seen: Attention
    norm: NormRole


@dataclass
class Layer:
    """One layer.

    Attributes:
        attentions: over itself and, in a decoder of two sequences, over the memory.
        activation: of its feed-forward network, `silu` gated or another.
        norm: around that.
        placement: "pre" or "post".
    """

    attentions: list[Attending]
    activation: str
    up: Map
    gate: Map | None
    down: Map
    norm: NormRole
    placement: str

    @property
    def place(self) -> str:
        """Path of its first attention."""
        return self.attentions[0].place


@dataclass
class StackRole:
    """Layers one behind another, and what enters them.

    Attributes:
        embedding: `[V, D]`; None: it is given embeddings.
        scale: by which its rows are multiplied.
        added: `[T, D]`: what the positions add.
        entering: the norm between embeddings and the first layer.
        layers: in order.
        closing: the norm behind the last one.
    """

    embedding: Tensor | None
    scale: float
    added: Tensor
    entering: NormRole | None
    layers: list[Layer]
    closing: NormRole | None


@dataclass
class Roles:
    """What a model is made of.

    Attributes:
        stacks: one, or an encoder's and a decoder's.
        output: the map to the vocabulary; None: hidden states are given.
    """

    stacks: list[StackRole]
    output: Map | None
