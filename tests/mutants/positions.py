"""Faults of positions: sinusoidal, learned, rotary, ALiBi, T5."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.reference.attention import MultiHeadAttention
from veriformer.reference.position_bias import alibi_slopes, t5_bucket
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import model, positions


def _table(omega: Any) -> Any:
    def table(length: int, width: int) -> Tensor:
        angles = torch.arange(length, dtype=torch.float64)[:, None] * omega(width)
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)

    return table


def _right(width: int) -> Tensor:
    return 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


@fault(
    "PE01",
    "Exponent uses 2*i where i is already the channel index (and cos uses i+1)",
    killed_by=("sinusoidal.definition", "sinusoidal.relative-shift", "sinusoidal.inner-product", "sinusoidal.bounded"),
    cause="channel index",
)
def channel_index() -> Subject:
    def table(length: int, width: int) -> Tensor:
        channel = torch.arange(width, dtype=torch.float64)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * 10000.0 ** (-2 * channel / width)
        return torch.where(torch.arange(width) % 2 == 0, angles.sin(), angles.cos())

    return positions(table)


@fault(
    "PE02",
    "Operator precedence in the exponent",
    killed_by=("sinusoidal.definition", "sinusoidal.wavelengths"),
    cause="floor division",
)
def precedence() -> Subject:
    return positions(_table(lambda d: (torch.arange(0, d, 2, dtype=torch.float64) * (-math.log(1e4) / d // 2)).exp()))


@fault(
    "PE04",
    "Integer arithmetic truncates frequencies",
    killed_by=("sinusoidal.definition", "sinusoidal.wavelengths"),
    cause="floor division",
)
def integers() -> Subject:
    return positions(_table(lambda d: (torch.arange(0, d, 2) * int(-math.log(1e4) / d)).double().exp()), width=8)


@fault(
    "PE05",
    "sin/cos concatenated as halves instead of interleaved, which is declared",
    killed_by=("sinusoidal.definition",),
    cause="halves order",
)
def halves() -> Subject:
    def table(length: int, width: int) -> Tensor:
        angles = torch.arange(length, dtype=torch.float64)[:, None] * _right(width)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    return positions(table, layout="interleaved")


@fault(
    "PE-amplitude",
    "The encoding is doubled",
    killed_by=("sinusoidal.bounded", "sinusoidal.definition"),
    cause="times those of the formula",
)
def doubled() -> Subject:
    return positions(lambda n, d: 2 * _table(_right)(n, d))


@fault(
    "PE-wrap",
    "Positions wrap around after 64",
    killed_by=("sinusoidal.unique", "sinusoidal.relative-shift"),
    cause="they begin again",
)
def wrapped() -> Subject:
    return positions(lambda n, d: _table(_right)(64, d).repeat(n // 64 + 1, 1)[:n])


class _Stored(nn.Module):
    """A table of `max_len` rows, kept as `keep` says; beyond it the last row comes again."""

    def __init__(self, config: Any, keep: str) -> None:
        super().__init__()
        table = _table(_right)(config.max_len, config.d_model).float()
        if keep == "parameter":
            self.table = nn.Parameter(table)
        elif keep == "buffer":
            self.register_buffer("table", table)
        else:
            self.table = table  # a plain attribute: it does not move with the module

    def forward(self, length: int) -> Tensor:
        last = length if isinstance(self._buffers.get("table"), Tensor) else len(self.table) - 1
        return self.table[torch.arange(length).clamp(max=last)]


def _stored(keep: str) -> Subject:
    keep = put(keep, instead_of="buffer")
    return Subject(
        kind="positions",
        build=lambda c: _Stored(c, keep),
        forward=lambda m, length: m(length),
        declares={"positions": "sinusoidal"},
    )


@fault(
    "PE08", "PE stored as a plain tensor attribute", killed_by=("sinusoidal.no-parameters",), cause="it is no buffer"
)
def plain_attribute() -> Subject:
    return _stored("attribute")


@fault(
    "PE-trained", "The sinusoidal table is a parameter", killed_by=("sinusoidal.no-parameters",), cause="a parameter"
)
def trained() -> Subject:
    return _stored("parameter")


@fault(
    "PE11",
    "Beyond its end the table repeats its last row",
    killed_by=("sinusoidal.any-length",),
    cause="come again|repeats",
)
def clamped() -> Subject:
    return _stored("attribute")


def _looked_up(model: nn.Module, length: int) -> Tensor:
    return model(torch.arange(length))


@fault(
    "PE10",
    "Sequence longer than the learned table raises nothing",
    killed_by=("learned.table",),
    cause="raises no error",
)
def learned_clamped() -> Subject:
    return Subject(
        kind="positions",
        build=lambda c: nn.Embedding(c.max_len, c.d_model),
        forward=put(lambda m, length: m(torch.arange(length).clamp(max=m.num_embeddings - 1)), instead_of=_looked_up),
        declares={"positions": "learned"},
    )


@fault("learned-shift", "Position t uses row t + 1", killed_by=("learned.table",), cause="begin at row 1")
def learned_shifted() -> Subject:
    return Subject(
        kind="positions",
        build=lambda c: nn.Embedding(c.max_len, c.d_model),
        forward=put(lambda m, length: m((torch.arange(length) + 1) % m.num_embeddings), instead_of=_looked_up),
        declares={"positions": "learned"},
    )


def _rotary(rotate: Any, **facts: Any) -> Subject:
    rotate = put(rotate, instead_of=lambda x, p: _turn(x, _angles(x, p)))
    return Subject(kind="rotary", forward=lambda m, x, positions: rotate(x, positions), declares=facts)


def _angles(x: Tensor, position: Tensor, exponent: float = 2.0) -> Tensor:
    half = x.shape[-1] // 2
    return position.double()[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) * exponent / x.shape[-1])


def _turn(x: Tensor, angles: Tensor, sign: float = -1.0) -> Tensor:
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos + sign * b * sin, a * sin + b * cos], dim=-1).flatten(-2)


@fault(
    "rotary-sign",
    "A sign is missing in the rotation",
    killed_by=("rotary.isometry", "rotary.composition"),
    cause="changes the norm",
)
def missing_sign() -> Subject:
    return _rotary(lambda x, p: _turn(x, _angles(x, p), sign=1.0))


@fault(
    "RP04",
    "Rotated pairs concatenated instead of re-interleaved",
    killed_by=("rotary.identity", "rotary.composition"),
    cause="not the identity",
)
def not_interleaved() -> Subject:
    def rotate(x: Tensor, p: Tensor) -> Tensor:
        turned = _turn(x, _angles(x, p))
        return torch.cat([turned[..., 0::2], turned[..., 1::2]], dim=-1)

    return _rotary(rotate)


@fault(
    "RP05",
    "Rotation indexed by head instead of time",
    killed_by=("rotary.identity", "rotary.composition"),
    cause="i - j from j - i",
)
def by_head() -> Subject:
    return _rotary(lambda x, p: _turn(x.transpose(1, 2), _angles(x, torch.arange(x.shape[1]))).transpose(1, 2))


@fault(
    "RP01",
    "Angles computed in bf16",
    killed_by=("rotary.relative", "rotary.precision", "rotary.composition"),
    cause="no longer told apart|rotating twice",
)
def coarse_angles() -> Subject:
    return _rotary(
        lambda x, p: _turn(x, (p.to(torch.bfloat16)[:, None] * _angles(x, torch.ones(1)).to(torch.bfloat16)).double())
    )


@fault(
    "RP11",
    "Positions doubled by default",
    killed_by=("rotary.frequencies",),
    cause="2 times too large",
)
def doubled_positions() -> Subject:
    return _rotary(lambda x, p: _turn(x, 2 * _angles(x, p)))


@fault("RP-exponent", "Frequencies base^(-i/K)", killed_by=("rotary.frequencies",), cause="base^(-i/K)")
def wrong_exponent() -> Subject:
    return _rotary(lambda x, p: _turn(x, _angles(x, p, exponent=1.0)))


@fault(
    "rotary-even", "The score does not tell i - j from j - i", killed_by=("rotary.relative",), cause="i - j from j - i"
)
def even() -> Subject:
    return _rotary(lambda x, p: x * (1 + 0 * _angles(x, p).cos().to(x.dtype).repeat_interleave(2, -1)))


@fault("RP12", "Values are rotated too", killed_by=("rotary.values-untouched",), cause="shifting all positions")
def values_rotated() -> Subject:
    class Wrong(MultiHeadAttention):
        def forward(self, x: Tensor, memory: Any = None, **given: Any) -> Any:
            index = torch.arange(x.shape[1])[None].expand(len(x), -1)
            original = self.v_proj
            turned = self.rotary(self._split(original(x), self.num_key_value_heads), index)
            self.v_proj = _Constant(turned.transpose(1, 2).flatten(2))
            try:
                return super().forward(x, memory, **{**given, "positions": index})
            finally:
                self.v_proj = original

    def change(built: nn.Module) -> None:
        for one in built.stack.layers:
            one.attention.__class__ = Wrong

    return model(change, {"padding_side": "both"}, architecture="decoder", positions="rotary")


class _Constant(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.value


def _bias(function: Any, **facts: Any) -> Subject:
    def forward(model: Any, query_len: int, key_len: int) -> Tensor:
        return function(torch.arange(query_len)[:, None], torch.arange(key_len)[None, :])

    return Subject(kind="position_bias", forward=forward, declares=facts)


def _alibi(values: list[float], sign: float = -1.0, **declares: str) -> Subject:
    values, sign = put((values, sign), instead_of=(alibi_slopes(len(values)), -1.0))
    return _bias(lambda t, s: sign * torch.tensor(values)[:, None, None] * (t - s).abs(), positions="alibi", **declares)


@fault(
    "bias-absolute",
    "The bias depends on the key's own position",
    killed_by=("position-bias.relative",),
    cause="query and key move together",
)
def absolute_bias() -> Subject:
    share = put(0.01, instead_of=0.0)
    return _bias(lambda t, s: (-(t - s).abs() - share * s**2).float()[None].repeat(3, 1, 1), positions="relative")


@fault(
    "RB01",
    "ALiBi slopes for head counts that are not powers of two",
    killed_by=("alibi.slopes",),
    cause="no power of two",
)
def plain_slopes() -> Subject:
    return _alibi([2.0 ** (-8.0 * i / 6) for i in range(1, 7)], slopes="interleaved")


@fault("RB02", "ALiBi slopes start at 2^0", killed_by=("alibi.slopes",), cause="i from 0")
def slopes_from_one() -> Subject:
    return _alibi([2.0 ** (-8.0 * i / 4) for i in range(4)])


@fault("alibi-sign", "ALiBi favours what is far", killed_by=("alibi.monotone", "alibi.slopes"), cause="negative")
def favours_far() -> Subject:
    return _alibi(alibi_slopes(4), sign=1.0)


@fault(
    "RB04",
    "T5 bucket function wrong: sign handling",
    killed_by=("t5.buckets",),
    cause="sign",
)
def swapped_sign() -> Subject:
    numbers = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))

    sign = put(1, instead_of=-1)

    def function(t: Tensor, s: Tensor) -> Tensor:
        bucket = t5_bucket(sign * (t - s), bidirectional=False, num_buckets=32, max_distance=128)
        return numbers[bucket].permute(2, 0, 1)

    return _bias(function, positions="t5", bidirectional=False)


@fault(
    "RP02",
    "Autocast silently lowers the frequency matmul",
    killed_by=("rotary.precision",),
    cause="which autocast computes in bfloat16",
)
def lowered_frequencies() -> Subject:
    class Rotary(nn.Module):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            half = x.shape[-1] // 2
            rates = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
            angle = positions.float()[:, None] @ rates[None, :]  # a product: autocast takes it to bfloat16
            cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    return Subject(
        kind="rotary", build=lambda c: Rotary(), forward=lambda m, x, positions: m(x, positions),
        declares={"layout": "halves"},
    )  # fmt: skip


@fault(
    "RP13",
    "Partial rotary slices the table on the wrong axis",
    killed_by=("rotary.identity", "rotary.relative"),
    cause="not rotated at all",
)
def sliced_in_time() -> Subject:
    def rotate(model: Any, x: Tensor, positions: Tensor) -> Tensor:
        width = x.shape[-1] // 2 // 2 * 2
        rates = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) * 2 / width)
        table = torch.arange(int(positions.max()) + width + 1, dtype=torch.float64)[:, None] * rates
        angle = table[: width // 2, :1].T  # the first rows, where the rows of `positions` are due
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., : width // 2], x[..., width // 2 : width]
        return torch.cat([a * cos - b * sin, a * sin + b * cos, x[..., width:]], dim=-1)

    return Subject(kind="rotary", forward=rotate, declares={"layout": "halves", "rotary_dim": 2}, domain={})
