"""A reference Transformer of a model's configuration, with the model's weights in it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.attention import Attention
from veriformer.properties.definitions.angles import turned
from veriformer.properties.twin.parts import Layer, Map, NormRole, NumberError, PartedError, Roles, StackRole
from veriformer.reference.config import Config
from veriformer.reference.model import build
from veriformer.reference.normalization import NORMS
from veriformer.reference.position_bias import alibi_slopes, t5_bucket
from veriformer.reference.positions import sinusoidal

_ACTIVATIONS = {("relu", False): "relu", ("gelu", False): "gelu", ("gelu_tanh", False): "gelu_tanh",
                ("silu", True): "swiglu"}  # fmt: skip
_BASES = (10000.0, 1e3, 1e5, 5e5, 1e6)
_FAR = 128
"""Distance from which T5 buckets saturate: at short distances any other gives the same buckets."""


@dataclass(frozen=True)
class Turning:
    """How queries and keys are turned.

    Attributes:
        base: of the frequencies.
        layout: "halves" or "interleaved".
        sign: 1.0, or -1.0 for the other sense.
    """

    base: float
    layout: str
    sign: float


@dataclass
class Twin:
    """A model of the reference that holds another's weights.

    Attributes:
        module: it, as far as the hidden states.
        head: what makes its outputs of them.
        config: of it.
        longest: positions that are known; None: any.
    """

    module: nn.Module
    head: nn.Module
    config: Config
    longest: int | None

    @property
    def told(self) -> str:
        """The configuration in words."""
        c = self.config
        groups = f", {c.key_value_heads} of keys" if c.key_value_heads != c.num_heads else ""
        scaled = ", embeddings times sqrt(d)" if c.embedding_scale else ""
        return (
            f"{c.architecture}, {c.num_layers} layers, {c.num_heads} heads{groups}, {c.norm_placement}-LN ({c.norm}), "
            f"{c.activation}, positions {c.positions}{', tied' if c.tied else ''}{scaled}"
        )


@dataclass(frozen=True)
class Order:
    """How order enters a stack.

    Attributes:
        positions: one of the reference's kinds.
        table: `[L, D]` of learned positions.
        bias: `[buckets, H]` of T5.
        turning: of rotary ones.
    """

    positions: str
    table: Tensor | None = None
    bias: Tensor | None = None
    turning: Turning | None = None

    @property
    def longest(self) -> int | None:
        """Positions that are known; None: any."""
        return _FAR // 4 if self.bias is not None else None if self.table is None else len(self.table)


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
    activation = _alike(layers)
    kind = "encoder_decoder" if len(found.stacks) > 1 else _architecture(last)
    if len({len(stack.layers) for stack in found.stacks}) > 1:
        raise PartedError("its encoder and its decoder have different numbers of layers")
    orders = [_order_of(stack, tables, limit, base) for stack in found.stacks]
    if len({(o.positions, o.turning, None if o.table is None else len(o.table)) for o in orders}) > 1:
        raise PartedError("positions enter its encoder and its decoder in two ways")
    width = last.added.shape[1]
    if max(s.scale for s in found.stacks) - min(s.scale for s in found.stacks) > 1e-5 * last.scale:
        raise NumberError(f"embeddings are multiplied by {found.stacks[0].scale:.6g} and by {last.scale:.6g}")
    if min(abs(last.scale - 1), abs(last.scale / width**0.5 - 1)) > 1e-5:
        raise NumberError(f"embeddings are multiplied by {last.scale:.6g}, neither by 1 nor by sqrt(d_model)")
    attention, table, bias = first.attentions[0], orders[0].table, orders[0].bias
    d_head = attention.seen.query.shape[-1]
    config = Config(
        architecture=kind, vocab_size=max(1 if s.embedding is None else len(s.embedding) for s in found.stacks),
        d_model=width, num_heads=attention.seen.query.shape[1], d_head=d_head, embedding_norm=last.entering is not None,
        num_key_value_heads=len(attention.key.weight) // d_head, d_ff=len(first.up.weight),
        num_layers=len(last.layers), num_buckets=32 if bias is None else len(bias), max_distance=_FAR,
        max_len=8 if table is None else len(table), positions=orders[0].positions, norm=first.norm.kind,
        norm_placement=first.placement, activation=activation, embedding_scale=abs(last.scale - 1) > 1e-5,
        attention_scale=attention.scale,
        tied=kind == "decoder" and found.output is not None and last.embedding is not None
        and torch.equal(found.output.weight, last.embedding),
    )  # fmt: skip
    module: Any = build(config).double().eval()
    is_pair = kind == "encoder_decoder"
    entrances = (module.source_embedding, module.target_embedding) if is_pair else (module.embedding,)
    stacks = (module.encoder, module.decoder) if is_pair else (module.stack,)
    for entrance, stack, own, order in zip(entrances, stacks, found.stacks, orders, strict=True):
        _fill(entrance, stack, own, order)
    module.output = nn.Identity()
    return Twin(module, _head(found.output), config, min((o.longest for o in orders if o.longest), default=None))


def _alike(layers: list[Layer]) -> str:
    """Return the activation of layers that are all built in one way."""
    first = layers[0]
    for layer in layers:
        if (layer.placement, layer.activation) != (first.placement, first.activation):
            told = [f"{x.place} is {x.placement}-LN with {x.activation}" for x in (layer, first)]
            raise PartedError(f"its layers are built in two ways: {told[0]}, {told[1]}")
        for own in layer.attentions:
            if abs(own.scale / first.attentions[0].scale - 1) > 1e-5:
                told = [f"{own.place} is {own.scale:.6g}", f"{first.place} {first.attentions[0].scale:.6g}"]
                raise NumberError(f"the scale of {told[0]}, that of {told[1]}")
    activation = _ACTIVATIONS.get((first.activation, first.gate is not None))
    if activation is None:
        gated = ", gated" if first.gate else ""
        raise PartedError(f"the activation is {first.activation}{gated}, which is no reference's")
    return activation


def _architecture(stack: StackRole) -> str:
    """Return "decoder" where every layer has the causal mask, "encoder" where none has any."""
    first = stack.layers[0].attentions[0].seen.hidden
    kind = "decoder" if bool(first.any()) else "encoder"
    for layer in stack.layers:
        hidden = layer.attentions[0].seen.hidden
        wanted = torch.ones_like(hidden).triu(1) if kind == "decoder" else torch.zeros_like(hidden)
        if not torch.equal(hidden, wanted):
            raise PartedError(f"the mask of {layer.place} is not that of a textbook's {kind}")
    return kind


def _order_of(stack: StackRole, tables: list[Tensor], limit: float, base: float | None) -> Order:
    """Return how order enters a stack."""
    kind, table = _absolute(stack, tables, limit)
    turning = None if kind != "none" else _turning(stack, limit, base)
    if turning is not None:
        return Order("rotary", turning=turning)
    if not any(float(layer.attentions[0].seen.bias.abs().amax()) > 1e3 * limit for layer in stack.layers):
        return Order(kind, table)
    if kind != "none":
        raise PartedError(f"positions enter twice: {kind}, and in the scores")
    bias = _t5_table(stack, tables, limit)
    if bias is None:
        _require_alibi(stack, limit)
    return Order("alibi" if bias is None else "t5", bias=bias)


def _absolute(found: StackRole, tables: list[Tensor], limit: float) -> tuple[str, Tensor | None]:
    """Return the kind of positions that are added, and their table."""
    added, width = found.added, found.added.shape[1]
    size = 1.0 if found.embedding is None else max(float(found.embedding.abs().amax()) * found.scale, 1e-12)
    if float(added.abs().amax()) <= 10 * limit * size:
        return "none", None
    if float((added - sinusoidal(torch.arange(len(added)), width)).abs().amax()) <= 100 * limit:
        return "sinusoidal", None
    for table in tables:
        rows = table.detach().double().reshape(-1, table.shape[-1]) if table.ndim >= 2 else table[None]
        if rows.shape[-1] != width:
            continue
        for start in range(min(4, max(len(rows) - len(added) + 1, 0))):
            rest = added - rows[start : start + len(added)]  # one row for all: that of a segment
            if float((rest - rest[:1]).abs().amax()) <= 100 * limit * float(rows.abs().amax()):
                return "learned", rows[start:] + rest[:1]
    raise PartedError("what positions add is neither the sinusoidal table nor rows of a table of the model")


def _turning(found: StackRole, limit: float, base: float | None) -> Turning | None:
    """Return how the first layer turns queries and keys; None where it does not."""
    attention = found.layers[0].attentions[0].seen
    if _turn_error(attention, None) <= 100 * limit:
        return None
    for b, layout, sign in product((base,) if base else _BASES, ("interleaved", "halves"), (1.0, -1.0)):
        turning = Turning(b, layout, sign)
        if _turn_error(attention, turning) <= 100 * limit:
            for layer in found.layers[1:]:
                if _turn_error(layer.attentions[0].seen, turning) > 100 * limit:
                    raise PartedError(f"{layer.place} turns queries and keys otherwise than {found.layers[0].place}")
            return turning
    raise PartedError(f"{found.layers[0].place} turns queries and keys, and not by the rotary angles of a known base")


def _turn_error(attention: Attention, turning: Turning | None) -> float:
    """Return how far queries and keys are from their projections, turned or as they are."""
    worst = 0.0
    for rows, sources in ((attention.query, attention.query_from), (attention.key, attention.key_from)):
        width = rows.shape[-1]
        at = torch.arange(rows.shape[2], dtype=torch.float64)
        for head, source in enumerate(sources):
            assert source is not None
            wanted = source.source * source.factor
            if turning is not None:
                angles = at[:, None] * turning.base ** (-torch.arange(0, width - 1, 2, dtype=torch.float64) / width)
                wanted = turned(wanted, angles, turning.layout, turning.sign)
            worst = max(worst, float((rows[:, head] - wanted).abs().amax() / rows[:, head].abs().amax()))
    return worst


def _t5_table(found: StackRole, tables: list[Tensor], limit: float) -> Tensor | None:
    """Return the table `[buckets, H]` of which every layer's bias is made; None where there is none."""
    seen = found.layers[0].attentions[0].seen
    heads, length, _ = seen.bias.shape
    at = torch.arange(length)
    for table in tables:
        if table.ndim != 2 or table.shape[1] != heads or not 4 <= table.shape[0] <= 256:
            continue
        bucket = t5_bucket(
            at[None, :] - at[:, None],
            bidirectional=not bool(seen.hidden.any()),
            num_buckets=len(table),
            max_distance=_FAR,
        )
        bias = table.detach().double()[bucket].permute(2, 0, 1)
        if all(_bias_error(layer.attentions[0].seen, bias) <= 1e3 * limit for layer in found.layers):
            return table.detach().double()
    return None


def _bias_error(attention: Attention, bias: Tensor) -> float:
    """Return how far what is added to the scores is from a bias `[H, T, T]`, up to a constant a row."""
    seen = ~attention.hidden
    middle = torch.where(seen, bias, 0.0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
    return float(torch.where(seen, bias - middle - attention.bias, 0.0).abs().amax())


def _require_alibi(found: StackRole, limit: float) -> None:
    """Require that every layer adds the bias of ALiBi to its scores."""
    for layer in found.layers:
        heads, length, _ = layer.attentions[0].seen.bias.shape
        at = torch.arange(length, dtype=torch.float64)
        distance = (at[:, None] - at[None, :]).abs()
        bias = -torch.tensor(alibi_slopes(heads), dtype=torch.float64)[:, None, None] * distance
        if _bias_error(layer.attentions[0].seen, bias) > 1e3 * limit:
            raise PartedError(f"{layer.place} adds to its scores what is neither ALiBi nor a T5 bias")


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
            attention = getattr(layer, name)
            turning = order.turning if name == "attention" else None
            channels = _order(attention.d_head, turning)
            _put(attention.q_proj, attending.query, channels)
            _put(attention.k_proj, attending.key, channels)
            _put(attention.v_proj, attending.value)
            _put(attention.o_proj, attending.output)
            if turning is not None:
                attention.rotary.base = turning.base
            _put_norm(_norm_of(getattr(layer, f"around_{name}"), own.placement), attending.norm)
        network = layer.feed_forward
        if own.gate is not None:
            _put(network.gate, own.gate)
        _put(network.up, own.up)
        _put(network.down, own.down)
        _put_norm(_norm_of(layer.around_feed_forward, own.placement), own.norm)
    if order.bias is not None:
        stack.layers[0].attention.position_bias.table.weight.copy_(order.bias)  # one serves all layers
    if found.closing is not None:
        stack.final_norm = NORMS[found.closing.kind](len(found.closing.gain), found.closing.eps).double()
        _put_norm(stack.final_norm, found.closing)


def _norm_of(around: Any, placement: str) -> Any:
    return around.norm_in if placement == "pre" else around.norm_out


def _head(output: Map | None) -> nn.Module:
    """Return the map to the outputs."""
    if output is None:
        return nn.Identity()
    head = nn.Linear(output.weight.shape[1], len(output.weight), dtype=torch.float64)
    _put(head, output)
    return head


def _order(width: int, turning: Turning | None) -> list[int] | None:
    """Return the channels of a head in the order of the reference, whose pairs are neighbours; None: as they are."""
    if turning is None:
        return None
    half = width // 2
    pairs = [(i, i + half) if turning.layout == "halves" else (2 * i, 2 * i + 1) for i in range(half)]
    return [channel for pair in pairs for channel in (pair if turning.sign > 0 else pair[::-1])]


@torch.no_grad()
def _put(linear: nn.Linear, own: Map, order: list[int] | None = None) -> None:
    weight, bias = own.weight, own.bias
    if order is not None:
        weight = weight.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)
        bias = None if bias is None else bias.unflatten(0, (-1, len(order)))[:, order].flatten()
    linear.weight.copy_(weight)
    if linear.bias is not None:
        linear.bias.copy_(torch.zeros(len(weight)) if bias is None else bias)


def _put_norm(norm: Any, own: NormRole) -> None:
    norm.weight.copy_(own.gain)
    norm.eps = own.eps
    if isinstance(getattr(norm, "bias", None), Tensor):
        norm.bias.copy_(own.bias)
