"""Faults that begin at a number: of samples, rows, positions, or channels that leave a rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.reference.normalization import LayerNorm, RMSNorm
from veriformer.reference.position_bias import T5Bias
from veriformer.reference.positions import LearnedPositions, SinusoidalPositions
from veriformer.reference.rotary import Rotary
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.anatomy import each_attention
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import SelfAttention, model, self_attention

_BEGINS = "it begins with sequences of"


def _as_they_are(x: Tensor) -> Tensor:
    return x


@fault(
    "reach-row-offsets",
    "Where the keys of a sample and head begin in one flat store is kept in 15 bits and a sign",
    killed_by=("attention.tiles",),
    cause="right up to",
)
def offsets_in_two_bytes() -> Subject:
    kept = put(lambda begins: begins.to(torch.int16).long(), instead_of=_as_they_are)

    def gathered(store: Tensor) -> Tensor:
        count, length = store.shape[0] * store.shape[1], store.shape[2]
        rows = kept(torch.arange(count) * length)[:, None] + torch.arange(length)
        return store.flatten(0, 2)[rows % (count * length)].view_as(store)

    def forward(
        _: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        scores = q @ gathered(k).mT * q.shape[-1] ** -0.5
        allow = torch.ones(scores.shape[-2:], dtype=torch.bool) if attention_mask is None else attention_mask
        if causal:
            allow = allow & torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return scores.masked_fill(~allow, -torch.inf).softmax(-1).nan_to_num(0.0) @ gathered(v)

    return Subject(kind="attention", forward=forward)


class _Summed(torch.autograd.Function):
    """A gain that gathers its gradient over rows `[N, D]` in a way of its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gain: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(rows, gain)
        ctx.add = add
        return rows * gain

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        rows, gain = ctx.saved_tensors
        return along * gain, ctx.add(along * rows), None


class _RowsOfGain(nn.Module):
    def __init__(self, width: int, add: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gain, self.add = nn.Parameter(torch.ones(width)), add

    def forward(self, x: Tensor) -> Tensor:
        plain = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        summed: Tensor = _Summed.apply(plain.flatten(0, -2), self.gain, self.add)  # type: ignore[no-untyped-call]
        return summed.view_as(x)


@fault(
    "reach-gain-rows",
    "Of more than 32 rows each of 32 workers adds up as many gradients of the gain, and what is left over goes unadded",
    killed_by=("norm.per-token",),
    cause="the gradient of gain misses",
)
def rows_left_over() -> Subject:
    def worked(terms: Tensor) -> Tensor:
        each = max(len(terms) // 32, 1)
        return terms[: 32 * each].sum(0)

    add = put(worked, instead_of=lambda terms: terms.sum(0))
    return Subject(
        kind="norm", build=lambda c: _RowsOfGain(c.d_model, add), forward=lambda m, x: m(x),
        declares={"norm": "rms", "once_differentiable": True},
    )  # fmt: skip


class _RowsOfScale(SelfAttention):
    """Self-attention whose values have a scale a channel, with a backward of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(config.d_model))

    def add(self, terms: Tensor) -> Tensor:
        return terms.sum(0)

    def values(self, x: Tensor) -> Tensor:
        own: Tensor = _Summed.apply(self.v(x).flatten(0, 1), self.scale, self.add)  # type: ignore[no-untyped-call]
        return own.view_as(x)


@fault(
    "reach-scale-rows",
    "The gradient of a scale inside attention is that of the first 256 tokens of a batch",
    killed_by=("batch.independence",),
    cause="the backward of scale leaves samples out",
)
def first_rows_alone() -> Subject:
    class Wrong(_RowsOfScale):
        def add(self, terms: Tensor) -> Tensor:
            return terms[:256].sum(0)

    return self_attention(Wrong, once_differentiable=True)


@fault(
    "reach-samples",
    "Padding masks are kept for 32 samples, and the 33rd takes that of the first",
    killed_by=("padding.content-irrelevant",),
    cause="it begins with batches of 33",
)
def masks_of_the_first_samples() -> Subject:
    class Wrong(SelfAttention):
        def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            return super().weights(scores, None if mask is None else mask[torch.arange(len(mask)) % 32])

    return self_attention(Wrong)


class _Turning(nn.Module):
    """Rotary positions in halves, made from what it is given; of a claimed length."""

    def __init__(self, width: int, longest: int, count: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        self.longest, self.count = longest, count

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if int(positions.max()) >= self.longest:
            raise ValueError(f"a position lies beyond {self.longest}")
        angle = self.count(positions).double()[:, None] * self.rates
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


@fault(
    "far-million",
    "Of the million positions that are claimed those from 2^19 on are counted as the last one before",
    killed_by=("positions.far",),
    cause="524288",
)
def half_a_million() -> Subject:
    count = put(lambda positions: positions.clamp(max=2**19 - 1), instead_of=_as_they_are)
    return Subject(
        kind="rotary", build=lambda c: _Turning(c.d_head, c.max_len, count), forward=lambda m, x, at: m(x, at),
        declares={"layout": "halves", "max_len": 2**20, "beyond_max_len": "error"},
    )  # fmt: skip


@fault(
    "anatomy-far-buckets",
    "Distances beyond 90 are cut before their buckets are looked up, in a model of 128",
    killed_by=("anatomy.positions",),
    cause="is the first that falls into the bucket of another",
)
def distances_are_cut() -> Subject:
    class Cut(T5Bias):
        def forward(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
            length = key_positions.shape[1]
            whole = super().forward(query_positions, key_positions)
            ago = (query_positions[0, :, None] - key_positions[0, None, :]).clamp(0, 90)
            return whole[:, :, -1].flip(-1)[..., ago.clamp(max=length - 1)]

    def change(built: Any) -> None:
        for attention in each_attention(built):
            attention.position_bias.__class__ = Cut

    facts = {"num_buckets": 32, "max_distance": 128}
    return model(change, facts, architecture="decoder", positions="t5", **facts)


@fault(
    "anatomy-far-sinusoids",
    "The sinusoidal table of a model has 200 rows, and begins anew behind them",
    killed_by=("anatomy.positions",),
    cause="right up to position|it begins with sequences of",
)
def table_begins_anew() -> Subject:
    class Short(SinusoidalPositions):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return super().forward(x, positions % 200)

    return model(lambda m: setattr(m.embedding.positions, "__class__", Short))


@fault(
    "anatomy-far-rotary",
    "Positions are counted in a byte where keys are turned, in one layer",
    killed_by=("anatomy.positions",),
    cause="are turned as those of position 0: they begin again",
)
def angles_in_a_byte() -> Subject:
    class Byte(Rotary):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return super().forward(x, positions.to(torch.uint8).long())

    return model(
        lambda m: setattr(each_attention(m)[-1].rotary, "__class__", Byte), architecture="decoder", positions="rotary"
    )


@fault(
    "anatomy-far-rows",
    "The rows of a learned table are looked up in blocks of 128 from where the block before began",
    killed_by=("anatomy.positions",),
    cause=_BEGINS,
)
def rows_of_the_first_block() -> Subject:
    class Blocks(LearnedPositions):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return super().forward(x, positions - (positions >= 128).long())

    return model(
        lambda m: setattr(m.embedding.positions, "__class__", Blocks),
        {"position_offset": 0, "max_len": 400}, architecture="decoder", positions="learned",
    )  # fmt: skip


def _normed(wrong: type[nn.Module], like: str) -> Subject:
    def change(built: Any) -> None:
        for part in built.modules():
            if type(part).__name__ == wrong.__mro__[1].__name__:
                part.__class__ = wrong

    facts = {"norm": like, "norm_placement": "pre"}
    return model(change, facts, architecture="decoder", positions="rotary", **facts)


@fault(
    "anatomy-lanes",
    "The mean square of RMSNorm is taken in four steps over each 32 channels, and of wide models leaves the rest out",
    killed_by=("anatomy.norm",),
    cause="leaves out the last",
)
def rest_of_the_lanes() -> Subject:
    class Lanes(RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            width = x.shape[-1]
            body = width if width < 64 else width // 32 * 32
            square = x[..., :body].square().sum(-1, keepdim=True) / width
            return self.weight * x / (square + self.eps).sqrt()

    return _normed(Lanes, "rms")


@fault(
    "anatomy-block-means",
    "The variance of LayerNorm is the mean of those of blocks of 24, each about its own mean",
    killed_by=("anatomy.norm",),
    cause="of 120 channels",
)
def variances_of_blocks() -> Subject:
    class Blocks(LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] <= 24:
                return super().forward(x)
            parts = x.split(24, dim=-1)
            variance = torch.stack([part.var(-1, unbiased=False) for part in parts]).mean(0)[..., None]
            return self.weight * (x - x.mean(-1, keepdim=True)) / (variance + self.eps).sqrt() + self.bias

    return _normed(Blocks, "layer")
