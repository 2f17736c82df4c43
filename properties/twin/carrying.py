"""A reference Transformer of a model's configuration, with the model's weights in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.twin.ordering import FAR, Order, Turning, order_of
from veriformer.properties.twin.parts import (
    Attending,
    Joined,
    Layer,
    Map,
    NormRole,
    NumberError,
    PartedError,
    Roles,
    StackRole,
    UnlikeError,
)
from veriformer.reference.config import Config
from veriformer.reference.model import build
from veriformer.reference.positions import NoPositions

_ACTIVATIONS = {("silu", True): "swiglu", ("gelu", True): "geglu", ("gelu_tanh", True): "geglu_tanh"}
_PLAIN = ("relu", "relu_squared", "gelu", "gelu_tanh", "quick_gelu")


@dataclass
class Twin:
    """A model of the reference that holds another's weights.

    Attributes:
        module: it, as far as the hidden states; of a classifier the whole.
        head: what makes its outputs of them.
        config: of it.
        longest: positions that are known; None: any.
        takes_memory: whether it is a decoder that is given a memory.
    """

    module: nn.Module
    head: nn.Module
    config: Config
    longest: int | None
    takes_memory: bool = False

    @property
    def told(self) -> str:
        """The configuration in words."""
        c = self.config
        closes = c.is_closed != replace(c, final_norm=None).is_closed
        more = {
            "side by side": c.parallel,
            f"closing norm {'added' if c.is_closed else 'left out'}": closes,
            f"base {c.base:g}": c.base != Config.base,
            f"{c.rotary_dim} of {c.head_width} channels turned": c.rotary_dim is not None,
            "queries and keys normalised": c.query_key_norm,
            f"window {c.window}": c.window is not None,
            "tied": c.tied,
            "embeddings times sqrt(d)": c.embedding_scale,
            f"pooling {c.pooling}, {c.num_registers} registers": c.architecture == "classifier",
        }
        groups = f", {c.key_value_heads} of keys" if c.key_value_heads != c.num_heads else ""
        kind = "decoder with a memory" if self.takes_memory else c.architecture
        return ", ".join([
            f"{kind}, {c.num_layers} layers, {c.num_heads} heads{groups}",
            f"{c.norm_placement}-LN ({c.norm}), {c.activation}, positions {c.positions}",
            *(words for words, holds in more.items() if holds),
        ])  # fmt: skip


def twin_of(found: Roles, tables: list[Tensor], limit: float, base: float | None) -> Twin:
    """Build the twin of what a model is made of.

    Args:
        found: its parts.
        tables: parameters and buffers, where a table of positions may be.
        limit: largest relative difference that is rounding.
        base: of rotary or sinusoidal positions, where one is declared.

    Raises:
        PartedError: the reference has no such configuration.
    """
    layers = [layer for stack in found.stacks for layer in stack.layers]
    first, last = layers[0], found.stacks[-1]
    activation = _alike(layers, [n for s in found.stacks for n in (s.entering, s.closing) if n is not None])
    kind, window = _architecture(last)
    if found.pooled is not None and kind == "decoder":
        raise PartedError("it is causal, and the textbook's classifier is not")
    is_pair = len(found.stacks) > 1 or found.takes_memory
    kind = "classifier" if found.pooled is not None else "encoder_decoder" if is_pair else kind
    if len({len(stack.layers) for stack in found.stacks}) > 1:
        raise PartedError("its encoder and its decoder have different numbers of layers")
    width = last.added.shape[1]
    if max(s.scale for s in found.stacks) - min(s.scale for s in found.stacks) > 1e-5 * last.scale:
        raise NumberError(f"embeddings are multiplied by {found.stacks[0].scale:.6g} and by {last.scale:.6g}")
    if min(abs(last.scale - 1), abs(last.scale / width**0.5 - 1)) > 1e-5:
        raise NumberError(f"embeddings are multiplied by {last.scale:.6g}, neither by 1 nor by sqrt(d_model)")
    orders = [order_of(stack, tables, limit, base) for stack in found.stacks]
    if len({(o.positions, o.turning, None if o.table is None else len(o.table)) for o in orders}) > 1:
        raise PartedError("positions enter its encoder and its decoder in two ways")
    order = orders[0]
    attention = first.attentions[0]
    d_head = attention.seen.query.shape[-1]
    pooling = "mean" if found.pooled is None else found.pooled.kind
    usual = first.placement != "post"
    given: dict[str, Any] = dict(  # noqa: C408
        architecture=kind, vocab_size=max(1 if s.embedding is None else len(s.embedding) for s in found.stacks),
        d_model=width, num_heads=attention.seen.query.shape[1], d_head=d_head, embedding_norm=last.entering is not None,
        num_key_value_heads=len(attention.key.own.weight) // d_head, d_ff=len(first.up.weight),
        num_layers=len(last.layers), num_buckets=32 if order.bias is None else len(order.bias), max_distance=FAR,
        max_len=8 if order.table is None else len(order.table), positions=order.positions, base=order.base,
        rotary_dim=None if order.turning is None or order.turning.width == d_head else order.turning.width,
        norm=first.norms[0].kind, norm_placement=first.placement, parallel=first.is_parallel,
        final_norm=None if (last.closing is not None) == usual else not usual, activation=activation, window=window,
        embedding_scale=abs(last.scale - 1) > 1e-5, attention_scale=attention.scale,
        query_key_norm=attention.query.norm is not None, pooling=pooling,
        num_registers=len(last.extras) - (pooling == "cls"),
        num_classes=1 if found.pooled is None or found.output is None else len(found.output.weight),
        tied=kind == "decoder" and found.output is not None and last.embedding is not None
        and torch.equal(found.output.weight, last.embedding),
    )  # fmt: skip
    try:
        config = Config(**given)
    except ValueError as problem:
        raise PartedError(f"the textbook has no such model: {problem}") from None
    module: Any = build(config).double().eval()
    if found.takes_memory:
        _let_through(module)
    entrances = (module.source_embedding, module.target_embedding) if is_pair else (module.embedding,)
    stacks = (module.encoder, module.decoder) if is_pair else (module.stack,)
    known = len(found.stacks)
    for entrance, stack, own, of in zip(entrances[-known:], stacks[-known:], found.stacks, orders, strict=True):
        _fill(entrance, stack, own, of)
    longest = min((o.longest for o in orders if o.longest), default=None)
    if found.pooled is not None:
        _fill_classifier(module, found, last)
        return Twin(module, nn.Identity(), config, longest)
    module.output = nn.Identity()
    return Twin(module, _head(found.output), config, longest, found.takes_memory)


def _let_through(module: Any) -> None:
    """Let an encoder give what it is given: the memory itself."""
    module.source_embedding.tokens, module.source_embedding.positions = nn.Identity(), NoPositions()
    module.source_embedding.norm, module.source_embedding.scale = nn.Identity(), 1.0
    module.encoder.layers, module.encoder.final_norm = nn.ModuleList(), nn.Identity()


def _alike(layers: list[Layer], others: list[NormRole]) -> str:
    """Return the activation of layers that are all built in one way, with norms of one kind."""
    first = layers[0]
    for layer in layers:
        if _built(layer) != _built(first):
            raise UnlikeError(
                f"its layers are built in two ways: {layer.place} is {_built(layer)}, {first.place} is {_built(first)}"
            )
        for own in layer.attentions:
            apart = abs(own.scale / first.attentions[0].scale - 1)
            if apart > 1e-5:
                scales = [f"{own.place} is {own.scale:.6g}", f"{first.place} {first.attentions[0].scale:.6g}"]
                told = f"the scale of {scales[0]}, that of {scales[1]}"
                raise NumberError(told) if apart > 1e-3 else PartedError(f"{told}: they are capped, it may be")
    kinds = sorted({n.kind for layer in layers for n in layer.norms} | {n.kind for n in others})
    if len(kinds) > 1:
        raise PartedError(f"its norms are of two kinds: {', '.join(kinds)}")
    if first.gate is None and first.activation in _PLAIN:
        return first.activation
    activation = _ACTIVATIONS.get((first.activation, first.gate is not None))
    if activation is None:
        gated = ", gated" if first.gate else ""
        raise PartedError(f"the activation is {first.activation}{gated}, which is no reference's")
    return activation


def _built(layer: Layer) -> str:
    parallel = " side by side" if layer.is_parallel else ""
    normed = " and normalised queries and keys" * sum(a.query.norm is not None for a in layer.attentions)
    return f"{layer.placement}-LN{parallel} with {layer.activation}{normed}"


def _architecture(stack: StackRole) -> tuple[str, int | None]:
    """Return "decoder" where every layer has the causal mask, "encoder" where none has, and how far they see."""
    first = stack.layers[0].attentions[0].seen.hidden
    length = first.shape[-1]
    kind = "encoder" if torch.equal(first, first.mT) else "decoder"
    for window in (None, *range(1, length)):
        wanted = torch.ones_like(first).triu(1) if kind == "decoder" else torch.zeros_like(first)
        if window is not None:
            wanted = wanted | torch.ones_like(first).tril(-window) | torch.ones_like(first).triu(window)
        if torch.equal(first, wanted):
            for layer in stack.layers:
                if not torch.equal(layer.attentions[0].seen.hidden, wanted):
                    raise UnlikeError(f"the mask of {layer.place} is another one than that of {stack.layers[0].place}")
            return kind, window
    raise PartedError(f"the mask of {stack.layers[0].place} is not that of a textbook's {kind}")


@torch.no_grad()
def _fill(embedding: Any, stack: Any, found: StackRole, order: Order) -> None:
    """Put the weights where they belong."""
    table = found.embedding
    embedding.tokens = nn.Identity() if table is None else nn.Embedding.from_pretrained(table)
    if found.entering is not None:
        _put_norm(embedding.norm, found.entering)
    if order.table is not None:
        embedding.positions.table.weight.copy_(order.table)
    for layer, own in zip(stack.layers, found.layers, strict=True):
        names = ("attention", "cross_attention")[: len(own.attentions)]
        for name, attending in zip(names, own.attentions, strict=True):
            _fill_attention(getattr(layer, name), attending, order.turning if name == "attention" else None)
            _put_around(getattr(layer, f"around_{name}"), attending.joined)
        network = layer.feed_forward
        if own.gate is not None:
            _put(network.gate, own.gate)
        _put(network.up, own.up)
        _put(network.down, own.down)
        _put_around(layer.around_feed_forward, own.joined)
    if order.bias is not None:
        stack.layers[0].attention.position_bias.table.weight.copy_(order.bias)  # one serves all layers
    if found.closing is not None:
        _put_norm(stack.final_norm, found.closing)


def _fill_attention(attention: Any, own: Attending, turning: Turning | None) -> None:
    channels = _order(attention.d_head, turning)
    for projection, norm, side in (
        (attention.q_proj, attention.query_norm, own.query),
        (attention.k_proj, attention.key_norm, own.key),
    ):
        _put(projection, side.own, channels)
        if side.norm is not None:
            _put_norm(norm, side.norm, channels)
    _put(attention.v_proj, own.value)
    _put(attention.o_proj, own.output)


@torch.no_grad()
def _fill_classifier(module: Any, found: Roles, stack: StackRole) -> None:
    """Put the tokens that stand first, the pooling's weights and the map to the classes in their places."""
    module.extras.copy_(stack.extras)
    if found.pooled is not None and found.pooled.score is not None:
        _put(module.pooling.score, found.pooled.score)
    if found.output is not None:
        _put(module.classify, found.output)


def _head(output: Map | None) -> nn.Module:
    """Return the map to the outputs."""
    if output is None:
        return nn.Identity()
    head = nn.Linear(output.weight.shape[1], len(output.weight), dtype=torch.float64)
    _put(head, output)
    return head


def _order(width: int, turning: Turning | None) -> list[int]:
    """Return the channels of a head in the order of the reference, whose turned pairs are neighbours and come first."""
    if turning is None:
        return list(range(width))
    half = turning.width // 2
    pairs = [(i, i + half) if turning.layout == "halves" else (2 * i, 2 * i + 1) for i in range(half)]
    turned = [channel for pair in pairs for channel in (pair if turning.sign > 0 else pair[::-1])]
    return [*turned, *range(turning.width, width)]


@torch.no_grad()
def _put(linear: nn.Linear, own: Map, order: list[int] | None = None) -> None:
    weight, bias = own.weight, own.bias
    if order is not None:
        weight = weight.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)
        bias = None if bias is None else bias.unflatten(0, (-1, len(order)))[:, order].flatten()
    linear.weight.copy_(weight)
    if linear.bias is not None:
        linear.bias.copy_(torch.zeros(len(weight)) if bias is None else bias)


def _put_around(around: Any, joined: Joined) -> None:
    for place, norm in joined.norms.items():
        _put_norm(getattr(around, f"norm_{place}"), norm)


@torch.no_grad()
def _put_norm(norm: Any, own: NormRole, order: list[int] | None = None) -> None:
    norm.weight.copy_(own.gain if order is None else own.gain[order])
    norm.eps = own.eps
    if isinstance(getattr(norm, "bias", None), Tensor):
        norm.bias.copy_(own.bias if order is None else own.bias[order])
