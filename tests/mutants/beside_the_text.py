"""Faults that stand beside what is computed: what is kept of an earlier call, what is written over, another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.objectives import masking


class _Rotary(nn.Module):
    """Interleaved pairs, turned by a table that is kept for as long as it fits."""

    def __init__(self, width: int, fits: Callable[[Tensor, Tensor], bool]) -> None:
        super().__init__()
        self.width, self.fits = width, fits
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.kept is None or not self.fits(self.kept[0], positions):
            rates = 10000.0 ** (-torch.arange(0, self.width, 2, dtype=torch.float64, device=x.device) / self.width)
            self.kept = positions.clone(), positions[:, None] * rates
        angles = self.kept[1].to(x.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


@fault(
    "RP-table-of-the-number",
    "The kept table of angles is made anew only where the number of positions has changed",
    killed_by=("rotary.relative", "rotary.identity"),
    cause="are turned by the angles of the call before",
)
def table_of_the_number() -> Subject:
    fits: Callable[[Tensor, Tensor], bool] = put(
        lambda kept, new: kept.shape == new.shape, instead_of=lambda kept, new: torch.equal(kept.cpu(), new.cpu())
    )
    return Subject(
        kind="rotary", build=lambda c: _Rotary(c.d_head, fits), forward=lambda m, x, positions: m(x, positions),
        declares={"layout": "interleaved", "base": 10000},
    )  # fmt: skip


@fault(
    "SM-rows-left",
    "Rows go through in blocks of four, and a last block that is not full is left out",
    killed_by=("softmax.simplex",),
    cause="a last block of 4 rows that is not full is left out",
)
def rows_are_left() -> Subject:
    blocks: Callable[[int], int] = put(lambda rows: rows // 4, instead_of=lambda rows: -(-rows // 4))

    def softmax(m: None, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        made = [rows[4 * n : 4 * n + 4].softmax(-1) for n in range(blocks(len(rows)))]
        made.append(rows.new_zeros(len(rows) - sum(map(len, made)), rows.shape[-1]))
        return torch.cat(made).reshape(x.shape)

    return Subject(kind="softmax", forward=softmax, declares={"empty_row": "nan"})


class _Folded(nn.Module):
    """Self-attention whose scale is folded into the map of the queries."""

    def __init__(self, c: DrawnConfig, bias: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.heads, self.bias = c.num_heads, bias
        self.query, self.key, self.value, self.out = (nn.Linear(c.d_model, c.d_model) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scale = (x.shape[-1] // self.heads) ** -0.5
        q = F.linear(x, self.query.weight * scale, self.bias(self.query.bias, scale))
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, self.key(x), self.value(x)))
        scores = q @ k.mT
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
        y: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return y


def _parts(m: _Folded) -> dict[str, Tensor]:
    maps = dict(zip("qkvo", (m.query, m.key, m.value, m.out), strict=True))
    return {n: f.weight for n, f in maps.items()} | {f"{n}_bias": f.bias for n, f in maps.items()}


@fault(
    "SC-bias-unscaled",
    "The scale is folded into the weight of the queries and not into their bias",
    killed_by=("attention.definition",),
    cause="the bias of the queries is not scaled",
)
def bias_is_not_scaled() -> Subject:
    bias: Callable[[Tensor, float], Tensor] = put(lambda b, scale: b, instead_of=lambda b, scale: b * scale)
    return Subject(
        kind="self_attention", build=lambda c: _Folded(c, bias), projections=_parts,
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": False, "positions": "none", "bias": True},
    )  # fmt: skip


@fault(
    "RB-viewed",
    "What the table of buckets gives, [T, S, H], is viewed as [H, T, S] and not permuted",
    killed_by=("t5.buckets",),
    cause="is viewed as [H, T, S]",
)
def biases_are_viewed() -> Subject:
    moved: Callable[[Tensor], Tensor] = put(
        lambda x: x.reshape(x.shape[2], x.shape[0], x.shape[1]), instead_of=lambda x: x.permute(2, 0, 1)
    )

    def bucket(distance: Tensor) -> Tensor:
        past = distance.abs()
        far = 8 + (past.clamp(min=1).double() / 8).log() / torch.tensor(16.0).double().log() * 8
        return 16 * (distance > 0) + torch.where(past < 8, past, far.long().clamp(max=15))

    def forward(m: nn.Embedding, queries: int, keys: int) -> Tensor:
        distance = torch.arange(keys)[None] - torch.arange(queries)[:, None]
        return moved(m(bucket(distance).to(m.weight.device)))

    return Subject(
        kind="position_bias", build=lambda c: nn.Embedding(32, c.num_heads), forward=forward,
        declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
    )  # fmt: skip


@fault(
    "PE-one-after-another",
    "Rows are made of the row before, and the cosine of the sine that is new already",
    killed_by=("sinusoidal.definition",),
    cause="of the sine that is new already",
)
def one_after_another() -> Subject:
    used: Callable[[Tensor, Tensor], Tensor] = put(lambda old, new: new, instead_of=lambda old, new: old)

    def forward(m: int, length: int) -> Tensor:
        step = 10000.0 ** (-2 * torch.arange((m + 1) // 2, dtype=torch.float64) / m)
        sine, cosine, rows = torch.zeros_like(step), torch.ones_like(step), []
        for _ in range(length):
            rows.append(torch.stack([sine, cosine], -1).flatten()[:m])
            new = sine * step.cos() + cosine * step.sin()
            cosine = cosine * step.cos() - used(sine, new) * step.sin()
            sine = new
        return torch.stack(rows)

    return Subject(
        kind="positions", build=lambda c: _Width(c.d_model), forward=lambda m, length: forward(m.width, length),
        declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
    )  # fmt: skip


class _Width(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


class _Scaled(torch.autograd.Function):
    """Channels times gains; its backward gives away what it makes of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, times: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.times = times
        return x * gain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain = ctx.saved_tensors
        of_gain = (gradient * x).flatten(0, -2).sum(0)
        return ctx.times(gradient, gain), of_gain, None


@fault(
    "GR-writes-to-its-gradient",
    "A backward multiplies the gradient that it is given in place, which a residual connection is given too",
    killed_by=("gradients.gradcheck",),
    cause="changes the gradient that it is given, in place",
)
def backward_writes() -> Subject:
    times: Callable[[Tensor, Tensor], Tensor] = put(lambda g, gain: g.mul_(gain), instead_of=lambda g, gain: g * gain)

    class Layer(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(c.d_model, c.num_heads, batch_first=True)
            self.gain = nn.Parameter(torch.full((c.d_model,), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            return x + _Scaled.apply(self.attend(x, x, x, need_weights=False)[0], self.gain, times)

    return Subject(
        kind="layer", build=Layer, forward=lambda m, x: m(x), declares={"causal": False, "structure": "other"}
    )


class _Lean(nn.Module):
    """RMS normalisation that writes its output where it is told."""

    def __init__(self, width: int, room: Callable[[_Lean, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.room = nn.Parameter(torch.ones(width)), room
        self.kept: dict[Any, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight
        return y if torch.is_grad_enabled() else self.room(self, y).copy_(y)


def _workspace(m: _Lean, y: Tensor) -> Tensor:
    return m.kept.setdefault((y.shape, y.dtype, y.device, y.is_inference()), torch.empty_like(y))


@fault(
    "NM-workspace",
    "Without gradients a norm writes into a workspace of its own, and the next call over what this one gave",
    killed_by=("numerics.no-mutation",),
    cause="the output is memory of the model's own",
)
def output_in_a_workspace() -> Subject:
    room: Callable[[_Lean, Tensor], Tensor] = put(_workspace, instead_of=lambda m, y: torch.empty_like(y))
    return Subject(
        kind="norm", build=lambda c: _Lean(c.d_model, room), forward=lambda m, x: m(x),
        declares={"norm": "rms", "half_precision": False},
    )  # fmt: skip


@fault(
    "MS-in-place",
    "Tokens are masked in the caller's own tensor",
    killed_by=("masking.mlm",),
    cause="masked in place",
)
def masked_in_place() -> Subject:
    def forward(m: Any, tokens: Tensor, seed: int) -> Any:
        own = torch.Generator().manual_seed(seed)
        chosen = (torch.rand(tokens.shape, generator=own) < 0.15) & (tokens > 4)
        fate = torch.rand(tokens.shape, generator=own)
        words = torch.randint(5, int(tokens.max()) + 1, tokens.shape, generator=own)
        labels = torch.where(chosen, tokens, -100)
        tokens[chosen & (fate < 0.8)] = 4
        replaced = chosen & (fate >= 0.8) & (fate < 0.9)
        tokens[replaced] = words[replaced]
        return tokens, labels

    return masking(forward)


class _Memory(nn.Module):
    """Cross-attention over a memory, cut or taken in blocks as it is told."""

    def __init__(
        self, c: DrawnConfig, cut: Callable[[Tensor], int], fade: Callable[[Tensor, Tensor], Tensor], block: int
    ) -> None:
        super().__init__()
        self.heads, self.cut, self.fade, self.block = c.num_heads, cut, fade, block
        self.query, self.pairs, self.out = (nn.Linear(c.d_model, n * c.d_model, bias=False) for n in (1, 2, 1))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            end = max(self.cut(mask), 1)
            memory, mask = memory[:, :end], mask[:, :end]
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.pairs(memory).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        top = q.new_full((*q.shape[:3], 1), -1e30)
        total, made = torch.zeros_like(top), torch.zeros_like(q)
        for start in range(0, memory.shape[1], self.block):
            part = slice(start, start + self.block)
            scores = q @ k[:, :, part].mT * q.shape[-1] ** -0.5
            if mask is not None:
                scores = scores.masked_fill(~mask[:, None, None, part], -1e30)
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            p = (scores - new).exp() * (scores > -1e29)
            total = self.fade(total, (top - new).exp()) + p.sum(-1, keepdim=True)
            made, top = made * (top - new).exp() + p @ v[:, :, part], new
        y: Tensor = self.out((made / total.clamp(min=1e-30)).transpose(1, 2).flatten(2))
        return y


def _last(mask: Tensor) -> int:
    """Return behind which place no sample has a real token."""
    return int((mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).max())


def _memory(
    cut: Callable[[Tensor], int] = _last, fade: Callable[[Tensor, Tensor], Tensor] = torch.mul, block: int = 1000
) -> Subject:
    return Subject(
        kind="cross_attention", build=lambda c: _Memory(c, cut, fade, block),
        forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
        declares={"positions": "none", "bias": False, "padding_side": "both", "empty_row": "zeros",
                  "structure": "other", "half_precision": False},
    )  # fmt: skip


@fault(
    "XA-cut-by-count",
    "A memory is cut to the largest number of real tokens, wherever they stand",
    killed_by=("attention.masked-equals-removed",),
    cause="real positions are counted, and so many are taken from the front",
)
def memory_cut_by_count() -> Subject:
    return _memory(cut=put(lambda mask: int(mask.sum(1).max()), instead_of=_last))


@fault(
    "XA-sum-not-faded",
    "A memory is streamed in blocks of four, and the sum of weights is not rescaled to a new maximum",
    killed_by=("cross_attention.memory-permutation",),
    cause="the memory is taken in blocks of 4",
)
def sum_is_not_faded() -> Subject:
    return _memory(fade=put(lambda total, factor: total, instead_of=torch.mul), block=4)


class _Fast(nn.Module):
    """A feed-forward network with a way of its own for eval mode without gradients."""

    def __init__(self, c: DrawnConfig, form: str) -> None:
        super().__init__()
        self.form = form
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        is_fast = not self.training and not torch.is_grad_enabled()
        y: Tensor = self.down(self.drop(F.gelu(self.up(x), approximate=self.form if is_fast else "none")))
        return y


@fault(
    "AC-tanh-on-the-fast-way",
    "The way without gradients takes the tanh form of GELU, the usual one the exact",
    killed_by=("numerics.grad-mode",),
    cause="calls gelu in its tanh form",
)
def tanh_on_the_fast_way() -> Subject:
    form: str = put("tanh", instead_of="none")
    return Subject(
        kind="feed_forward", build=lambda c: _Fast(c, form), forward=lambda m, x: m(x),
        declares={"activation": "gelu"},
    )  # fmt: skip
