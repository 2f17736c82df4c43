"""Where the queries, keys and values of a head come from: the part of an earlier product that they are.

Rotations keep the norms of tokens: one factor explains the norms of all tokens in the right part, and in no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter

import torch
from torch import Tensor

from veriformer.properties.anatomy.traced import Traced, Value

LINEAR = ("mm", "bmm", "matmul", "addmm", "baddbmm", "add")
"""Operations that linear maps come down to, adding their biases among them."""


@dataclass
class Head:
    """Where a head's queries or keys come from.

    Attributes:
        source: `[B, T, K]`: the part of an earlier product that it is, but for a factor and a rotation.
        factor: by which it was multiplied since.
        when: number of that product among the values.
        place: the module that made it.
        start: first channel of the part.
        step: from one of its channels to the next.
    """

    source: Tensor
    factor: float
    when: int
    place: str
    start: int
    step: int

    @property
    def channels(self) -> range:
        """The channels of the product that it is."""
        return range(self.start, self.start + self.source.shape[-1] * self.step, self.step)


@dataclass
class Parts:
    """All parts of what a linear map gave that may be heads, side by side or every n-th channel.

    Attributes:
        tokens: `[B, T, W]`.
        step: between two channels of a head.
        sizes: `[N, B T]`: norms of the tokens of each part.
    """

    tokens: Tensor
    step: int
    sizes: Tensor

    def part(self, number: int, width: int) -> tuple[Tensor, int]:
        """Return the part `[B, T, K]` of a number, and its first channel."""
        block, first = divmod(number, self.step)
        start = block * width * self.step + first
        return self.tokens[..., start : start + width * self.step : self.step][..., :width], start


def same_tokens(one: Tensor, other: Tensor, batch: int, limit: float) -> bool:
    """Whether two tensors hold the same tokens in the same order, or samples and positions change places."""
    if one.numel() != other.numel() or one.shape[-1] != other.shape[-1] or one[..., 0].numel() % batch:
        return False
    length = one[..., 0].numel() // batch
    a, b = (x.cpu().double().reshape(batch * length, -1) for x in (one, other))
    size = limit * float(a.abs().amax())
    turned = b.unflatten(0, (length, batch)).transpose(0, 1).flatten(0, 1)
    back = b.unflatten(0, (batch, length)).transpose(0, 1).flatten(0, 1)
    return any(float((a - c).abs().amax()) <= size for c in (b, turned, back))


def source_of(seen: Traced, part: Tensor, before: int) -> Head | None:
    """Return the part of an earlier product that a head's queries or keys are, rotated and scaled or not.

    Args:
        seen: the trace of a forward.
        part: `[B, T, K]`.
        before: number of the value at which they were used.
    """
    return sources_of(seen, part[:, None], before)[0]


def sources_of(seen: Traced, heads: Tensor, before: int) -> list[Head | None]:
    """Return `source_of` for each of several heads `[B, H, T, K]`."""
    _, many, length, width = heads.shape
    norms = heads.norm(dim=-1).transpose(0, 1).flatten(1)  # [H, B T]
    # of one norm: normalised, or nothing to tell by
    tells = ((norms.amin(-1) > 0) & ~(norms.std(-1) / norms.mean(-1) < 1e-3)).tolist()
    table = _table(seen, length, width) if any(tells) else None
    if table is None:
        return [None] * many
    products, whole, most = table.sizes @ norms.T, norms.square().sum(-1), seen.limit * norms.amax(-1)
    left = whole - products.square() / table.squares[:, None]  # the sum of squared errors, to which the largest is one
    near = left <= norms.shape[1] * most**2 + 1e-10 * whole
    return [
        _nearest(seen, table, norms[h], products[:, h], near[:, h], width, before) if tells[h] else None
        for h in range(many)
    ]


def _nearest(
    seen: Traced, table: _Table, norms: Tensor, products: Tensor, near: Tensor, width: int, before: int
) -> Head | None:
    most = seen.limit * float(norms.max())
    for owner, rows in groupby(near.nonzero().flatten().tolist(), key=table.owners.__getitem__):
        number, parts = table.parts[owner]
        if number >= before:
            continue
        factor, error, row = min(
            ((factor, float((norms - factor * table.sizes[row]).abs().max()), row)
             for row in rows for factor in [float(products[row] / table.squares[row])]),
            key=itemgetter(1),
        )  # fmt: skip
        value = seen.values[number]
        if error <= most and seen.once(
            ("of a map", number, parts.tokens.shape, parts.tokens.stride()),
            lambda value=value, parts=parts: _is_of_map(seen, value, parts.tokens),  # type: ignore[misc]
        ):
            source, start = parts.part(row - table.firsts[owner], width)
            return Head(source, factor, value.when, value.place, start, parts.step)
    return None


def _is_of_map(seen: Traced, value: Value, tokens: Tensor) -> bool:
    """Whether a value is what a linear map gave, or that and a bias: a rotation's two terms are added, too.

    Args:
        seen: the trace of a forward.
        value: one of its values.
        tokens: what it holds, `[B, T, W]`.
    """
    if value.name != "add":
        return True
    total = value.output.double().flatten(0, -2)
    size = seen.limit * float(total.abs().amax())
    for before in seen.values[max(0, value.when - 2) : value.when]:
        if before.name in LINEAR and before.output.numel() == value.output.numel():
            given = before.output.double()
            pairs = [(total, given.reshape(total.shape))]
            # heads that are projected one by one have biases of their own: the same for all tokens
            pairs += [(tokens.flatten(0, 1), x.flatten(0, 1)) for x in _as_tokens(given, *tokens.shape[:2])]
            for made, map_gave in pairs:
                rest = made - map_gave if made.shape == map_gave.shape else made
                if float((rest - rest[:1]).abs().amax()) <= size:
                    return True
    return False


@dataclass
class _Table:
    """All parts of all that linear maps gave, the last one first.

    Attributes:
        parts: each with the number of its value.
        firsts: row at which those of each begin.
        owners: of each row, which of `parts` it is of.
        sizes: `[N, B T]`: norms of the tokens of each.
        squares: `[N]`: their sums of squares.
    """

    parts: list[tuple[int, Parts]]
    firsts: list[int]
    owners: list[int]
    sizes: Tensor
    squares: Tensor


def _table(seen: Traced, length: int, width: int) -> _Table | None:
    known: _Table | None = seen.once(("parts", length, width), lambda: _tabled(seen, length, width))
    return known


def _tabled(seen: Traced, length: int, width: int) -> _Table | None:
    held = [
        (number, tokens)
        for number, value in reversed(list(enumerate(seen.values)))
        if value.name in LINEAR and _may_hold(value.output, seen.batch * length, width)
        for tokens in _as_tokens(value.output.double(), seen.batch, length)
    ]
    if not held:
        return None
    sizes = _sizes_of([tokens for _, tokens in held], width)
    parts = [
        (number, Parts(tokens, step, by_step[step]))
        for (number, tokens), by_step in zip(held, sizes, strict=True)
        for step in by_step
    ]
    counts = [len(part.sizes) for _, part in parts]
    owners = [owner for owner, count in enumerate(counts) for _ in range(count)]
    norms = torch.cat([part.sizes for _, part in parts])
    firsts = [0, *accumulate(counts)][:-1]
    return _Table(parts, firsts, owners, norms, norms.square().sum(-1).clamp(min=1e-300))


def parts_of(output: Tensor, batch: int, length: int, width: int) -> list[Parts]:
    """Return all parts of so many channels of the tokens of some tensor; none where it holds no such tokens."""
    if not _may_hold(output, batch * length, width):
        return []
    held = _as_tokens(output, batch, length)
    return [
        Parts(tokens, step, sizes)
        for tokens, by_step in zip(held, _sizes_of(held, width), strict=True)
        for step, sizes in by_step.items()
    ]


def _may_hold(output: Tensor, tokens: int, width: int) -> bool:
    """Whether a tensor may hold so many tokens, of whole parts of so many channels."""
    channels, left = divmod(output.numel(), tokens)
    return not left and channels % width == 0 and channels >= width


def _sizes_of(held: list[Tensor], width: int) -> list[dict[int, Tensor]]:
    """Return for each of `[B, T, W]` the norms `[N, B T]` of its parts, by the step between their channels.

    Those of as many channels are taken together.
    """
    found: list[dict[int, Tensor]] = [{} for _ in held]
    for channels in {x.shape[-1] for x in held}:
        alike = [i for i, x in enumerate(held) if x.shape[-1] == channels]
        squares, count = torch.stack([held[i] for i in alike]).square(), channels // width
        for step in (n for n in range(1, count + 1) if count % n == 0):
            norms = squares.unflatten(-1, (count // step, width, step)).sum(-2).sqrt().flatten(-2).flatten(1, 2).mT
            for i, own in zip(alike, norms, strict=True):
                found[i][step] = own
    return found


def _as_tokens(x: Tensor, batch: int, length: int) -> list[Tensor]:
    """Return `[B, T, W]` of what a linear map gave: samples first, or time first, or `[B, H, T, K]` head by head."""
    if x.ndim >= 3 and tuple(x.shape[:2]) == (length, batch):
        return [x.reshape(length, batch, -1).transpose(0, 1)]
    heads = [x.transpose(1, 2).reshape(batch, length, -1)] if x.ndim == 4 and x.shape[::2] == (batch, length) else []
    if x.ndim >= 3 and tuple(x.shape[:2]) == (batch, length):
        return [x.reshape(batch, length, -1), *heads]
    if heads:
        return heads
    if x.shape[-2] == batch * length or x.shape[0] == batch * length:
        flat = x.reshape(-1, batch * length, x.shape[-1]).transpose(0, 1).reshape(batch * length, -1)
        return [flat.unflatten(0, (batch, length)), flat.unflatten(0, (length, batch)).transpose(0, 1)]
    return []
