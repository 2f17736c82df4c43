"""How order enters a stack, told by what positions add, turn and bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import Attention
from veriformer.properties.anatomy.rotations import BASES, base_of, frequencies
from veriformer.properties.definitions.angles import turned
from veriformer.properties.twin.parts import NumberError, PartedError, StackRole, UnlikeError
from veriformer.reference.position_bias import alibi_slopes, t5_bucket
from veriformer.reference.positions import sinusoidal

FAR = 128
"""Distance from which T5 buckets saturate: at short distances any other gives the same buckets."""


@dataclass(frozen=True)
class Turning:
    """How queries and keys are turned.

    Attributes:
        base: of the frequencies.
        layout: "halves" or "interleaved".
        sign: 1.0, or -1.0 for the other sense.
        width: channels of a head that are.
    """

    base: float
    layout: str
    sign: float
    width: int


@dataclass(frozen=True)
class Order:
    """How order enters a stack.

    Attributes:
        positions: one of the reference's kinds.
        table: `[L, D]` of learned positions.
        bias: `[buckets, H]` of T5.
        turning: of rotary ones.
        base: of sinusoidal or rotary ones.
    """

    positions: str
    table: Tensor | None = None
    bias: Tensor | None = None
    turning: Turning | None = None
    base: float = 10000.0

    @property
    def longest(self) -> int | None:
        """Positions that are known; None: any."""
        return FAR // 4 if self.bias is not None else None if self.table is None else len(self.table)


def order_of(stack: StackRole, tables: list[Tensor], limit: float, base: float | None) -> Order:
    """Return how order enters a stack.

    Args:
        stack: its layers, and what enters them.
        tables: parameters and buffers, where a table of positions may be.
        limit: largest relative difference that is rounding.
        base: of rotary or sinusoidal positions, where one is declared.

    Raises:
        PartedError: in no way of the reference's.
    """
    order = _absolute(stack, tables, limit, base)
    turning = None if order.positions != "none" else _turning(stack, limit, base)
    if turning is not None:
        return Order("rotary", turning=turning, base=turning.base)
    if not any(float(layer.attentions[0].seen.bias.abs().amax()) > 1e3 * limit for layer in stack.layers):
        return order
    if order.positions != "none":
        raise PartedError(f"positions enter twice: {order.positions}, and in the scores")
    bias = _t5_table(stack, tables, limit)
    if bias is None:
        _require_alibi(stack, limit)
    return Order("alibi" if bias is None else "t5", bias=bias)


def _absolute(found: StackRole, tables: list[Tensor], limit: float, base: float | None) -> Order:
    """Return the positions that are added."""
    added, width = found.added, found.added.shape[1]
    size = 1.0 if found.embedding is None else max(float(found.embedding.abs().amax()) * found.scale, 1e-12)
    if float(added.abs().amax()) <= 10 * limit * size:
        return Order("none")
    for b in BASES if base is None else (base,):
        sines = sinusoidal(torch.arange(len(added)), width, b)
        factor = float((added * sines).sum() / sines.square().sum())
        if float((added - factor * sines).abs().amax()) > 100 * limit * abs(factor):
            continue
        if abs(factor - 1) <= 1e-5:
            return Order("sinusoidal", base=b)
        told = f"the sinusoids that are added are multiplied by {factor:.6g}"
        is_trained = any(t.numel() == 1 and abs(float(t) / factor - 1) <= 1e-5 for t in tables)
        raise PartedError(told) if is_trained else NumberError(told)
    for table in tables:
        rows = table.detach().double().reshape(-1, table.shape[-1]) if table.ndim else table[None]
        if rows.shape[-1] == width and (learned := _rows_of(added, rows, limit)) is not None:
            return Order("learned", learned)
    raise PartedError("what positions add is neither the sinusoidal table nor rows of a table of the model")


def _rows_of(added: Tensor, rows: Tensor, limit: float) -> Tensor | None:
    """Return a table, scaled as it is used, whose rows from some one on `added` are, but for one row for all.

    A segment's row is added to all. x-transformers divides its table by sqrt(d_model); another number is one too many.
    """
    moved, step = added - added.mean(0), added[1] - added[0]
    gaps = rows[1:] - rows[:-1]
    near = (gaps @ step) > (1 - 1e-6) * gaps.norm(dim=-1) * step.norm()
    for start in (int(i) for i in near.nonzero().flatten() if i + len(added) <= len(rows)):
        own = rows[start : start + len(added)]
        given = own - own.mean(0)
        factor = float((moved * given).sum() / given.square().sum().clamp(min=1e-300))
        if float((moved - factor * given).abs().amax()) > 100 * limit * float(rows.abs().amax()) * abs(factor):
            continue
        if min(abs(factor - 1), abs(factor * rows.shape[1] ** 0.5 - 1)) > 1e-5:
            raise NumberError(f"the rows of its table of positions are multiplied by {factor:.6g}")
        return factor * rows[start:] + (added - factor * own).mean(0)
    return None


def _turning(found: StackRole, limit: float, base: float | None) -> Turning | None:
    """Return how the first layer turns queries and keys; None where it does not."""
    first = found.layers[0].attentions[0].seen
    if _turn_error(first, None) <= 100 * limit:
        return None
    width = _turned_width(first, limit)
    for layout in ("interleaved", "halves"):
        own = _base(first, width, layout) if base is None else base
        for turning in (Turning(own, layout, sign, width) for sign in (1.0, -1.0) if own):
            if _turn_error(first, turning) <= 100 * limit:
                for layer in found.layers[1:]:
                    if _turn_error(layer.attentions[0].seen, turning) > 100 * limit:
                        raise UnlikeError(
                            f"{layer.place} turns queries and keys otherwise than {found.layers[0].place}"
                        )
                return turning
    raise PartedError(f"{found.layers[0].place} turns queries and keys, and not by the rotary angles of a known base")


def _base(attention: Attention, width: int, layout: str) -> float | None:
    """Return the base of the angles by which queries and keys are turned, of three digits if it is near such a one."""
    turns = frequencies(attention, width, layout)
    if turns is None:
        return None
    if len(turns) == 1:
        return 10000.0  # one pair turns by 1 whatever the base
    base = base_of(turns)
    plain = None if base is None else float(f"{base:.3g}")
    return plain if base and plain and abs(base / plain - 1) < 1e-3 else base


def _turned_width(attention: Attention, limit: float) -> int:
    """Return how many channels of a head, the first ones, are turned: those behind are as they were made."""
    last = 0
    for rows, sources in ((attention.query, attention.query_from), (attention.key, attention.key_from)):
        for head, source in enumerate(sources):
            assert source is not None
            apart = (rows[:, head] - source.source * source.factor).abs().amax((0, 1))
            differs = (apart > 0.03 * limit * float(rows[:, head].abs().amax())).nonzero()
            last = max(last, int(differs.max()) + 1 if len(differs) else 0)
    return last + last % 2


def _turn_error(attention: Attention, turning: Turning | None) -> float:
    """Return how far queries and keys are from their projections, turned or as they are."""
    worst = 0.0
    for rows, sources in ((attention.query, attention.query_from), (attention.key, attention.key_from)):
        at = torch.arange(rows.shape[2], dtype=torch.float64)
        for head, source in enumerate(sources):
            assert source is not None
            wanted = source.source * source.factor
            if turning is not None:
                even = torch.arange(0, turning.width - 1, 2, dtype=torch.float64)
                angles = at[:, None] * turning.base ** (-even / turning.width)
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
            max_distance=FAR,
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
