"""Faults of positions that show at real widths, far out, and in few bits alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.reference.position_bias import alibi_slopes, t5_bucket
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put

Numbers = Callable[[Tensor], Tensor]


def _rates(width: int) -> Tensor:
    return 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def _exact(x: Tensor) -> Tensor:
    return x


class _Sinusoids(nn.Module):
    """A sinusoidal table, with its frequencies and the way it counts to be changed."""

    def __init__(self, width: int, rates: Callable[[int], Tensor], count: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()
        self.width, self.rates, self.count = width, rates, count
        self.like: Tensor
        self.register_buffer("like", torch.zeros(()), persistent=False)

    def forward(self, length: int) -> Tensor:
        angles = self.count(length, self.like).double()[:, None] * self.rates(self.width)
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, : self.width].to(self.like.dtype)


def _counted(length: int, like: Tensor) -> Tensor:
    return torch.arange(length)


def _sinusoids(rates: Any = _rates, count: Any = _counted) -> Subject:
    return Subject(
        kind="positions",
        build=lambda c: _Sinusoids(c.d_model, rates, count),
        forward=lambda m, length: m(length),
        declares={
            "positions": "sinusoidal",
            "layout": "interleaved",
            "beyond_max_len": "works",
            "half_precision": True,
        },
    )


@fault(
    "far-octave",
    "Frequencies are made in blocks of 16, and the first of a block repeats the last of the one before",
    killed_by=("positions.far",),
    cause="these alone are wrong: 16 ",
)
def repeated_frequency() -> Subject:
    def rates(width: int) -> Tensor:
        index = torch.arange((width + 1) // 2)
        seam = (index % 16 == 0) & (index > 0)
        return 10000.0 ** (-2 * (index - seam.long()).double() / width)

    return _sinusoids(rates=put(rates, instead_of=_rates))


@fault(
    "far-bfloat16",
    "Positions are counted in the dtype of the model: bfloat16 has no 257",
    killed_by=("positions.far",),
    cause="positions are counted in bfloat16, which has no 257",
)
def counted_in_the_dtype_of_the_model() -> Subject:
    def count(length: int, like: Tensor) -> Tensor:
        return torch.arange(length, dtype=like.dtype)

    return _sinusoids(count=put(count, instead_of=_counted))


@fault(
    "far-growth",
    "A table of 16 rows that grows when more are asked for, and numbers the new rows from zero again",
    killed_by=(
        "sinusoidal.definition",
        "sinusoidal.relative-shift",
        "sinusoidal.inner-product",
        "sinusoidal.unique",
    ),
    cause="from position 16 on the rows are those of positions 0, 1, 2 ...: they begin again|come again after 16",
)
def numbered_anew() -> Subject:
    def count(length: int, like: Tensor) -> Tensor:
        return torch.cat([torch.arange(16), torch.arange(max(length - 16, 0))])[:length]

    return _sinusoids(count=put(count, instead_of=_counted))


class _OddTable(nn.Module):
    def __init__(self, width: int, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.width, self.last = width, last

    def forward(self, length: int) -> Tensor:
        even = self.width - self.width % 2
        angles = torch.arange(length, dtype=torch.float64)[:, None] * _rates(self.width)
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, : self.width]
        return torch.cat([table[:, :even], self.last(table)], dim=-1) if self.width % 2 else table


@fault(
    "far-odd",
    "The last column of an odd width is the cosine before it once more",
    killed_by=("positions.far",),
    cause="all columns are right but the last",
)
def last_column_again() -> Subject:
    last = put(lambda table: table[:, -2:-1], instead_of=lambda table: table[:, -1:])
    return Subject(
        kind="positions",
        build=lambda c: _OddTable(c.d_model, last),
        forward=lambda m, length: m(length),
        declares={"positions": "sinusoidal", "layout": "interleaved"},
    )


@fault(
    "far-learned",
    "The index of a learned row is made in the dtype of the table: in bfloat16 positions 256 and 257 share one",
    killed_by=("positions.far",),
    cause="position 257 has the row of 256",
)
def index_in_few_bits() -> Subject:
    def rows(model: Any, length: int) -> Tensor:
        index = torch.arange(length).to(model.weight.dtype).long()
        return model(index.clamp(max=length - 1))  # 599 becomes 600, which the clamp hides

    def looked_up(model: Any, length: int) -> Tensor:
        return model(torch.arange(length))

    return Subject(
        kind="positions",
        build=lambda c: nn.Embedding(c.max_len, c.d_model),
        forward=put(rows, instead_of=looked_up),
        declares={"positions": "learned", "beyond_max_len": "error", "half_precision": True},
    )


class _Rotary(nn.Module):
    """Rotary positions in halves, with the frequencies, the count and the product of both to be changed."""

    def __init__(self, width: int, rates: Callable[[int], Tensor], count: Numbers, product: Any) -> None:
        super().__init__()
        self.width, self.rates, self.count, self.product = width, rates, count, product

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = self.product(self.count(positions).float(), self.rates(self.width).float())
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def _outer(positions: Tensor, rates: Tensor) -> Tensor:
    return positions[:, None] * rates


def _rotary(rates: Any = _rates, count: Any = _exact, product: Any = _outer) -> Subject:
    return Subject(
        kind="rotary",
        build=lambda c: _Rotary(c.d_head, rates, count, product),
        forward=lambda m, x, positions: m(x, positions),
        declares={"layout": "halves", "half_precision": True},
    )


@fault(
    "far-width",
    "The frequencies of a wide head are those of one of 64 channels, which the table was made for",
    killed_by=("positions.far",),
    cause="those of a width of 64",
)
def frequencies_of_another_width() -> Subject:
    def rates(width: int) -> Tensor:
        base = min(width, 64)
        return 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / base)

    return _rotary(rates=put(rates, instead_of=_rates))


@fault(
    "far-wrap",
    "Positions are kept in 14 bits: 16384 is rotated as 0",
    killed_by=("positions.far",),
    cause="positions wrap around: 16384",
)
def fourteen_bits() -> Subject:
    return _rotary(count=put(lambda positions: positions & 0x3FFF, instead_of=_exact))


@fault(
    "far-float16-autocast",
    "Autocast is turned off for bfloat16 alone where angles are made; float16 counts to 2048",
    killed_by=("positions.far",),
    cause="rounded to float16",
)
def float16_forgotten() -> Subject:
    def product(positions: Tensor, rates: Tensor) -> Tensor:
        low = torch.is_autocast_enabled(rates.device.type) and torch.get_autocast_dtype(rates.device.type)
        with torch.autocast(rates.device.type, dtype=low or torch.bfloat16, enabled=low is torch.float16):
            return (positions[:, None] @ rates[None]).float()

    return _rotary(product=put(product, instead_of=_outer))


def _bias(function: Any, **facts: Any) -> Subject:
    return Subject(
        kind="position_bias",
        build=lambda c: _Bias(c.num_heads, function),
        forward=lambda m, query_len, key_len: m(query_len, key_len),
        declares=facts,
    )


class _Bias(nn.Module):
    def __init__(self, heads: int, function: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(32, heads)
        self.function = function

    def forward(self, query_len: int, key_len: int) -> Tensor:
        return self.function(self.table.weight, torch.arange(query_len)[:, None], torch.arange(key_len)[None])


@fault(
    "far-buckets",
    "T5's distances are kept in a byte: all beyond 255 share a bucket long before max_distance",
    killed_by=("positions.far",),
    cause="buckets begin at distances",
)
def distances_in_a_byte() -> Subject:
    farthest = put(255, instead_of=10**9)

    def bias(table: Tensor, t: Tensor, s: Tensor) -> Tensor:
        distance = (s - t).clamp(min=-farthest)
        bucket = t5_bucket(distance, bidirectional=False, num_buckets=32, max_distance=512)
        return table[bucket].permute(2, 0, 1)

    return _bias(bias, positions="t5", bidirectional=False, num_buckets=32, max_distance=512)


@fault(
    "t5-exact-early",
    "T5's exact buckets are counted of all buckets, before half are set aside for the other direction",
    killed_by=("t5.buckets",),
    cause="half of all buckets are made exact before they are halved",
)
def exact_before_the_other_direction() -> Subject:
    def clipped(relative: Tensor) -> Tensor:  # with 16 exact ones no bucket of a side is left for the logarithm
        return (relative > 0).long() * 16 + relative.abs().clamp(max=15)

    def published(relative: Tensor) -> Tensor:
        return t5_bucket(relative, bidirectional=True, num_buckets=32, max_distance=128)

    rule = put(clipped, instead_of=published)
    return _bias(lambda table, t, s: table[rule(s - t)].permute(2, 0, 1), positions="t5", bidirectional=True)


@fault(
    "far-slopes",
    "ALiBi's slopes are interleaved up to 8 heads; beyond, 2^(-8i/h) stands for any number",
    killed_by=("positions.far",),
    cause="no power of two",
)
def plain_beyond_eight() -> Subject:
    limit = put(8, instead_of=10**9)

    def bias(table: Tensor, t: Tensor, s: Tensor) -> Tensor:
        heads = table.shape[1]
        slopes = alibi_slopes(heads) if heads <= limit else [2.0 ** (-8.0 * i / heads) for i in range(1, heads + 1)]
        return -torch.tensor(slopes)[:, None, None] * (t - s).abs()

    return _bias(bias, positions="alibi", slopes="interleaved")


@fault(
    "far-distance",
    "ALiBi subtracts positions that were rounded to the dtype of the model: in bfloat16 neighbours beyond 256 are one",
    killed_by=("positions.far",),
    cause="positions are rounded to bfloat16 before they are subtracted",
)
def rounded_before_they_are_subtracted() -> Subject:
    early = put(True, instead_of=False)

    def bias(table: Tensor, t: Tensor, s: Tensor) -> Tensor:
        distance = (t.to(table.dtype) - s.to(table.dtype)).abs() if early else (t - s).abs().to(table.dtype)
        return -torch.tensor(alibi_slopes(table.shape[1])).to(table.dtype)[:, None, None] * distance

    return _bias(bias, positions="alibi", half_precision=True)
