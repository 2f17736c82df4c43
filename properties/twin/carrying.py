"""A reference Transformer of a model's configuration, with the model's weights in it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.attention import Attention
from veriformer.properties.definitions.angles import turned
from veriformer.properties.twin.parts import Map, NormRole, NumberError, PartedError, Roles
from veriformer.reference.config import Config
from veriformer.reference.model import build
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
    first = found.layers[0]
    width = found.added.shape[1]
    heads = first.attention.query.shape[1]
    d_head = first.attention.query.shape[-1]
    activation = _ACTIVATIONS.get((first.activation, first.gate is not None))
    if activation is None:
        raise PartedError(
            f"the activation is {first.activation}{', gated' if first.gate else ''}, which is no reference's"
        )
    for layer in found.layers[1:]:
        if (layer.placement, layer.activation) != (first.placement, first.activation):
            told = [f"{x.place} is {x.placement}-LN with {x.activation}" for x in (layer, first)]
            raise PartedError(f"its layers are built in two ways: {told[0]}, {told[1]}")
        if abs(layer.scale / first.scale - 1) > 1e-5:
            raise NumberError(
                f"the scale of {layer.place} is {layer.scale:.6g}, that of {first.place} {first.scale:.6g}"
            )
    kind = _architecture(found)
    positions, table, longest = _absolute(found, tables, limit)
    turning = None if positions not in ("none",) else _turning(found, limit, base)
    if turning is not None:
        positions = "rotary"
    bias = None
    if turning is None and _is_biased(found, limit):
        if positions != "none":
            raise PartedError(f"positions enter twice: {positions}, and in the scores")
        bias = _t5_table(found, tables, limit, kind)
        positions = "alibi" if bias is None else "t5"
        if bias is None:
            _require_alibi(found, limit)
    scale = found.scale
    if min(abs(scale - 1), abs(scale / width**0.5 - 1)) > 1e-5:
        raise NumberError(f"embeddings are multiplied by {scale:.6g}, neither by 1 nor by sqrt(d_model)")
    config = Config(
        architecture=kind, vocab_size=1 if found.embedding is None else len(found.embedding), d_model=width,
        num_heads=heads, d_head=d_head, embedding_norm=found.entering is not None,
        num_key_value_heads=len(first.key.weight) // d_head, d_ff=len(first.up.weight), num_layers=len(found.layers),
        num_buckets=32 if bias is None else len(bias), max_distance=_FAR,
        max_len=len(table) if table is not None else 8, positions=positions, norm=first.norms[0].kind,
        norm_placement=first.placement, activation=activation, embedding_scale=abs(scale - 1) > 1e-5,
        attention_scale=first.scale,
        tied=kind == "decoder" and found.output is not None and found.embedding is not None
        and torch.equal(found.output.weight, found.embedding),
    )  # fmt: skip
    module = build(config).double().eval()
    head = _fill(module, found, turning, table)
    if bias is not None:
        stack: Any = module.stack
        with torch.no_grad():
            stack.layers[0].attention.position_bias.table.weight.copy_(bias)  # one serves all layers
    return Twin(module, head, config, longest if bias is None else _FAR // 4)


def _architecture(found: Roles) -> str:
    """Return "decoder" where every layer has the causal mask, "encoder" where none has any."""
    first = found.layers[0].attention.hidden
    kind = "decoder" if bool(first.any()) else "encoder"
    for layer in found.layers:
        hidden = layer.attention.hidden
        wanted = torch.ones_like(hidden).triu(1) if kind == "decoder" else torch.zeros_like(hidden)
        if not torch.equal(hidden, wanted):
            raise PartedError(f"the mask of {layer.place} is not that of a textbook's {kind}")
    return kind


def _absolute(found: Roles, tables: list[Tensor], limit: float) -> tuple[str, Tensor | None, int | None]:
    """Return the kind of positions that are added, their table, and how far it is known."""
    added, width = found.added, found.added.shape[1]
    size = 1.0 if found.embedding is None else max(float(found.embedding.abs().amax()) * found.scale, 1e-12)
    if float(added.abs().amax()) <= 10 * limit * size:
        return "none", None, None
    if float((added - sinusoidal(torch.arange(len(added)), width)).abs().amax()) <= 100 * limit:
        return "sinusoidal", None, None
    for table in tables:
        rows = table.detach().double().reshape(-1, table.shape[-1]) if table.ndim >= 2 else table[None]
        if rows.shape[-1] != width:
            continue
        for start in range(min(4, max(len(rows) - len(added) + 1, 0))):
            rest = added - rows[start : start + len(added)]  # one row for all: that of a segment
            if float((rest - rest[:1]).abs().amax()) <= 100 * limit * float(rows.abs().amax()):
                return "learned", rows[start:] + rest[:1], len(rows) - start
    raise PartedError("what positions add is neither the sinusoidal table nor rows of a table of the model")


def _turning(found: Roles, limit: float, base: float | None) -> Turning | None:
    """Return how the first layer turns queries and keys; None where it does not."""
    attention = found.layers[0].attention
    if _turn_error(attention, None) <= 100 * limit:
        return None
    for b, layout, sign in product((base,) if base else _BASES, ("interleaved", "halves"), (1.0, -1.0)):
        turning = Turning(b, layout, sign)
        if _turn_error(attention, turning) <= 100 * limit:
            for layer in found.layers[1:]:
                if _turn_error(layer.attention, turning) > 100 * limit:
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


def _is_biased(found: Roles, limit: float) -> bool:
    return any(float(layer.attention.bias.abs().amax()) > 1e3 * limit for layer in found.layers)


def _t5_table(found: Roles, tables: list[Tensor], limit: float, kind: str) -> Tensor | None:
    """Return the table `[buckets, H]` of which every layer's bias is made; None where there is none."""
    heads, length, _ = found.layers[0].attention.bias.shape
    at = torch.arange(length)
    for table in tables:
        if table.ndim != 2 or table.shape[1] != heads or not 4 <= table.shape[0] <= 256:
            continue
        bucket = t5_bucket(
            at[None, :] - at[:, None], bidirectional=kind == "encoder", num_buckets=len(table), max_distance=_FAR
        )
        bias = table.detach().double()[bucket].permute(2, 0, 1)
        if all(_bias_error(layer.attention, bias) <= 1e3 * limit for layer in found.layers):
            return table.detach().double()
    return None


def _bias_error(attention: Attention, bias: Tensor) -> float:
    """Return how far what is added to the scores is from a bias `[H, T, T]`, up to a constant a row."""
    seen = ~attention.hidden
    middle = torch.where(seen, bias, 0.0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
    return float(torch.where(seen, bias - middle - attention.bias, 0.0).abs().amax())


def _require_alibi(found: Roles, limit: float) -> None:
    """Require that every layer adds the bias of ALiBi to its scores."""
    for layer in found.layers:
        heads, length, _ = layer.attention.bias.shape
        at = torch.arange(length, dtype=torch.float64)
        distance = (at[:, None] - at[None, :]).abs()
        bias = -torch.tensor(alibi_slopes(heads), dtype=torch.float64)[:, None, None] * distance
        if _bias_error(layer.attention, bias) > 1e3 * limit:
            raise PartedError(f"{layer.place} adds to its scores what is neither ALiBi nor a T5 bias")


@torch.no_grad()
def _fill(module: nn.Module, found: Roles, turning: Turning | None, table: Tensor | None) -> nn.Module:
    """Put the weights where they belong; return the map to the outputs."""
    embedding: Any = module.embedding
    stack: Any = module.stack
    if found.embedding is not None:
        embedding.tokens.weight.copy_(found.embedding)
    if found.entering is not None:
        _put_norm(embedding.norm, found.entering)
    if table is not None:
        embedding.positions.table.weight.copy_(table)
    for layer, own in zip(stack.layers, found.layers, strict=True):
        attention = layer.attention
        order = _order(attention.d_head, turning)
        _put(attention.q_proj, own.query, order)
        _put(attention.k_proj, own.key, order)
        _put(attention.v_proj, own.value)
        _put(attention.o_proj, own.output)
        if turning is not None:
            attention.rotary.base = turning.base
        network = layer.feed_forward
        if own.gate is not None:
            _put(network.gate, own.gate)
            _put(network.up, own.up)
            _put(network.down, own.down)
        else:
            first, second = (m for m in network.modules() if isinstance(m, nn.Linear))
            _put(first, own.up)
            _put(second, own.down)
        for around, norm in zip((layer.around_attention, layer.around_feed_forward), own.norms, strict=True):
            _put_norm(around.norm_in if own.placement == "pre" else around.norm_out, norm)
    if found.closing is not None:
        _put_norm(stack.final_norm, found.closing)
    module.output = nn.Identity()
    if found.output is None:
        return nn.Identity()
    head = nn.Linear(found.output.weight.shape[1], len(found.output.weight), dtype=torch.float64)
    _put(head, found.output)
    return head


def _order(width: int, turning: Turning | None) -> list[int] | None:
    """Return the channels of a head in the order of the reference, whose pairs are neighbours; None: as they are."""
    if turning is None:
        return None
    half = width // 2
    pairs = [(i, i + half) if turning.layout == "halves" else (2 * i, 2 * i + 1) for i in range(half)]
    return [channel for pair in pairs for channel in (pair if turning.sign > 0 else pair[::-1])]


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
