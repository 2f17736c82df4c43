"""What a model is taken apart into: maps, norms, layers; and how it is told where it is no textbook's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from veriformer.properties.anatomy.attention import Attention
from veriformer.reference.config import PLACEMENTS


class PartedError(Exception):
    """The model and the textbook's part; says where and in what."""


class UnlikeError(PartedError):
    """Layers of one model were read, and are built in two ways, which no textbook's are."""


class MixedError(PartedError):
    """The sublayers of one layer have their norms in different places."""


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
class Joined:
    """How a sublayer is joined to the stream.

    Attributes:
        norms: by where they stand: "in", "change", "out", as in the reference's `PLACEMENTS`.
        stream: what it is added to, `[B, T, D]`.
        end: the stream behind it.
    """

    norms: dict[str, NormRole]
    stream: Tensor
    end: Tensor

    @property
    def placement(self) -> str:
        """Key of `PLACEMENTS`; norms are found where some placement has them."""
        return next(name for name, places in PLACEMENTS.items() if set(places) == set(self.norms))


@dataclass
class Side:
    """The queries of an attention, or its keys.

    Attributes:
        own: the map that makes them, head by head.
        taken: what that is given.
        norm: of each head; None: they are not normalised.
    """

    own: Map
    taken: Tensor
    norm: NormRole | None


@dataclass
class Attending:
    """One attention with its projections.

    Attributes:
        place: its path.
        query: `[H K, D]`, head by head, as is `key` with its groups.
        scale: factor on q k^T.
        seen: as it was recognised.
        joined: how it is joined to the stream.
    """

    place: str
    query: Side
    key: Side
    value: Map
    output: Map
    scale: float
    seen: Attention
    joined: Joined


@dataclass
class Layer:
    """One layer.

    Attributes:
        attentions: over itself and, in a decoder of two sequences, over the memory.
        activation: of its feed-forward network, `silu` gated or another.
        joined: how that is joined to the stream.
        is_parallel: whether it takes the stream that the attention takes.
    """

    attentions: list[Attending]
    activation: str
    up: Map
    gate: Map | None
    down: Map
    joined: Joined
    is_parallel: bool = False

    @property
    def place(self) -> str:
        """Path of its first attention."""
        return self.attentions[0].place

    @property
    def placement(self) -> str:
        """Where its norms stand."""
        return self.joined.placement

    @property
    def norms(self) -> list[NormRole]:
        """All its norms."""
        around = [*self.joined.norms.values(), *(n for a in self.attentions for n in a.joined.norms.values())]
        return around + [s.norm for a in self.attentions for s in (a.query, a.key) if s.norm is not None]


@dataclass
class StackRole:
    """Layers one behind another, and what enters them.

    Attributes:
        embedding: `[V, D]`; None: it is given embeddings.
        scale: by which its rows are multiplied.
        added: `[T, D]`: what the positions add.
        extras: `[E, D]`: tokens of its own that stand before the others.
        entering: the norm between embeddings and the first layer.
        layers: in order.
        closing: the norm behind the last one.
    """

    embedding: Tensor | None
    scale: float
    added: Tensor
    extras: Tensor
    entering: NormRole | None
    layers: list[Layer]
    closing: NormRole | None


@dataclass
class Pooled:
    """How a sequence becomes one vector.

    Attributes:
        kind: key of the reference's `POOLINGS`.
        score: the map to the scores of weighted pooling.
        hidden: `[B, E + T, D]`: what is pooled.
    """

    kind: str
    score: Map | None
    hidden: Tensor


@dataclass
class Roles:
    """What a model is made of.

    Attributes:
        stacks: one, or an encoder's and a decoder's.
        output: the map to the vocabulary or to the classes; None: hidden states are given.
        pooled: of a classifier.
        takes_memory: whether its one stack is a decoder that is given a memory.
    """

    stacks: list[StackRole]
    output: Map | None
    pooled: Pooled | None = None
    takes_memory: bool = False
