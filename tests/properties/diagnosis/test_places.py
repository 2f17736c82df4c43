"""What is wrong for some samples, tokens, positions, labels or widths alone is said, with these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.bench.profiles import Settings
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.diagnosis.derivatives.gradients import wrong_gradient
from veriformer.properties.diagnosis.losses import loss_opinion
from veriformer.properties.diagnosis.norms import wrong_widths
from veriformer.properties.diagnosis.places.positions import odd_positions
from veriformer.properties.diagnosis.places.rows import of_other_samples
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RecordedDraws
from veriformer.properties.engine.violations import Violation
from veriformer.properties.formulas.relative_biases import bucket_cause
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject


def case(subject: Subject) -> Case:
    return Case(Workbench(subject, Settings(profile="quick")), RecordedDraws({"config": 0, "seed": 0}))


class Mixer(nn.Module):
    """One attention head with a residual connection; `slip` breaks what it does to a batch with a mask."""

    def __init__(self, c: DrawnConfig, slip: str = "") -> None:
        super().__init__()
        self.slip = slip
        self.up, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.wide, self.narrow = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def attend(self, x: Tensor, allow: Tensor) -> Tensor:
        q, k, v = self.up(x).chunk(3, -1)
        scores = (q @ k.mT / x.shape[-1] ** 0.5).masked_fill(~allow, torch.finfo(x.dtype).min)
        return x + self.out(scores.softmax(-1) @ v)

    def packed(self, x: Tensor, mask: Tensor) -> Tensor:
        ends = mask.sum(1).cumsum(0)
        index = torch.arange(int(ends[-1]))
        by = {"late": 0, "early": 2, "right": 1}[self.slip.removeprefix("packed ")]
        owner = torch.bucketize(index + (by - 1), ends, right=True).clamp(max=len(ends) - 1)
        out = torch.zeros_like(x)
        out[mask] = self.attend(x[mask], owner[:, None] == owner)
        return out

    def feed(self, x: Tensor) -> Tensor:
        if self.slip == "edges":
            return x + functional.pad(x, (0, 0, 1, 1))[:, :-2] + functional.pad(x, (0, 0, 1, 1))[:, 2:]
        if self.slip == "third":
            return x + (torch.arange(x.shape[1]) % 3 == 1).to(x.dtype)[:, None]
        size = 4 if self.slip == "tail" else 1
        whole = x.shape[1] // size * size
        return torch.cat([x[:, :whole] + self.narrow(torch.relu(self.wide(x[:, :whole]))), x[:, whole:]], 1)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = attention_mask
        if mask is None:
            return self.feed(self.attend(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)))
        if self.slip.startswith("packed"):
            return self.packed(x, mask)
        order = mask.sum(1).argsort(stable=True)
        if self.slip.startswith("sorted"):
            out = self.feed(self.attend(x[order], mask[order][:, None]))
            return out[
                {"sorted": order.argsort(), "sorted twice": order, "sorted once": torch.arange(len(x))}[self.slip]
            ]
        if self.slip == "sorted masks":
            mask = mask[order]
        return self.feed(self.attend(x, mask[:, None]))


def mixer(slip: str) -> Subject:
    return Subject(kind="layer", build=lambda c: Mixer(c, slip), mask_forms=("padding",),
                   declares={"causal": False, "positions": "none"})  # fmt: skip


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        ("", ""),
        ("sorted", ""),
        ("packed right", ""),
        ("sorted twice", "sorted by length (shortest first) and put back by that order itself, not by its inverse"),
        ("sorted once", "sorted by length (shortest first) and not put back"),
        ("packed late", "the first token of every sample but the first is seen by the sample before it"),
        ("packed early", "the last token of every sample but the last is seen by the sample after it"),
    ],
)
def test_whose_outputs_and_tokens_a_sample_gets_is_said(slip: str, words: str) -> None:
    told = of_other_samples(case(mixer(slip)))
    assert words in (told or "")
    assert bool(told) == bool(words), told


class Cross(nn.Module):
    """Attention to a memory whose mask is read as `slip` says."""

    def __init__(self, c: DrawnConfig, slip: str) -> None:
        super().__init__()
        self.slip, self.q, self.kv = slip, nn.Linear(c.d_model, c.d_model), nn.Linear(c.d_model, 2 * c.d_model)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones(memory.shape[:2], dtype=torch.bool) if memory_mask is None else memory_mask
        if self.slip == "tiles":
            mask = mask & torch.cat([t.any().expand(len(t)) for t in mask[0].split(4)])
        if self.slip == "first":
            mask = mask[:1].expand_as(mask)
        if self.slip == "longest":
            mask = mask.any(0).expand_as(mask)
        k, v = self.kv(memory).chunk(2, -1)
        scores = (self.q(x) @ k.mT / x.shape[-1] ** 0.5).masked_fill(~mask[:, None], torch.finfo(x.dtype).min)
        return x + scores.softmax(-1) @ v


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        ("", ""),
        ("tiles", "behind the last tile of 4 positions that has a token of the first sample"),
        ("first", "the memory mask of the first sample"),
        ("longest", "the memory is hidden only where all samples of the batch hide it"),
    ],
)
def test_whose_memory_mask_is_used_is_said(slip: str, words: str) -> None:
    subject = Subject(kind="cross_attention", build=lambda c: Cross(c, slip), declares={"positions": "none"})
    told = of_other_samples(case(subject))
    assert words in (told or "")
    assert bool(told) == bool(words), told


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        ("", ""),
        ("tail", "the positions of the incomplete last chunk of 4, from floor(T / 4) * 4 on"),
        ("edges", "the first and the last positions come out otherwise"),
        ("third", "every position t with t mod 3 = 1"),
    ],
)
def test_positions_that_are_treated_otherwise_are_said(slip: str, words: str) -> None:
    told = odd_positions(case(mixer(slip)))
    assert words in (told or "")
    assert bool(told) == bool(words), told


class Placed(nn.Module):
    """Learned positions, and then a layer."""

    def __init__(self, c: DrawnConfig, slip: str) -> None:
        super().__init__()
        self.embed, self.place, self.layer = (
            nn.Embedding(c.vocab_size, c.d_model),
            nn.Embedding(64, c.d_model),
            Mixer(c, slip),
        )

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.layer(self.embed(tokens) + self.place.weight[: tokens.shape[1]], attention_mask)


def test_the_part_that_leaves_positions_out_is_named() -> None:
    for slip in ("", "tail"):
        subject = Subject(kind="encoder", build=lambda c, slip=slip: Placed(c, slip), declares={"positions": "learned"})
        told = odd_positions(case(subject))
        assert ("in layer (Mixer)" in (told or "")) == bool(slip)


def function(slip: str) -> Callable[..., Any]:
    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
            act = functional.silu(gate, inplace=slip == "in place")
            ctx.save_for_backward(act if slip == "output kept" else gate, up)
            return act * up

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            gate, up = ctx.saved_tensors
            sig = torch.sigmoid(gate)
            slope = sig * (1 + gate * (1 - sig))
            if slip == "cut":
                slope = slope * (gate > -0.5)
            return g * up * slope, g * gate * sig

    return Gate.apply


class Gated(nn.Module):
    """A gated feed-forward network whose product is a Function with a backward of its own."""

    def __init__(self, c: DrawnConfig, slip: str) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(c.d_model, 40), nn.Linear(c.d_model, 40), nn.Linear(40, c.d_model)
        self.apply_gate = function(slip)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.apply_gate(self.gate(x), self.up(x)))


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        ("", ""),
        ("in place", "SiLU(gate) in place of gate: the forward overwrites gate in place"),
        ("output kept", "SiLU(gate) in place of gate: what is kept for the backward is not what the forward was given"),
        ("cut", "it is 0 where the input is below"),
    ],
)
def test_a_derivative_at_another_point_is_said(slip: str, words: str) -> None:
    told = wrong_gradient(case(Subject(kind="feed_forward", build=lambda c: Gated(c, slip))))
    assert words in (told or "")
    assert bool(told) == bool(words), told


def capped(factor: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    class Capped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = 5 * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / 5)
            p = scores.softmax(-1)
            ctx.save_for_backward(q, k, v, p, scores)
            return p @ v

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
            q, k, v, p, scores = ctx.saved_tensors
            dp = g @ v.mT
            ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * factor(scores) * q.shape[-1] ** -0.5
            return ds @ k, ds.mT @ q, p.mT @ g

    return lambda q, k, v: Capped.apply(q, k, v)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (lambda s: 1 - (s / 5).square(), ""),
        (lambda s: 1 - s.square(), "the backward takes 1 - capped^2"),
        (torch.ones_like, "the soft cap is left out of the backward"),
        (lambda s: 1 - s / 5, "it is not squared"),
    ],
)
def test_the_derivative_of_a_soft_cap_is_told(factor: Callable[[Tensor], Tensor], words: str) -> None:
    subject = Subject(kind="attention", forward=lambda _, q, k, v: capped(factor)(q, k, v), declares={"soft_cap": 5.0})
    told = wrong_gradient(case(subject))
    assert words in (told or "")
    assert bool(told) == bool(words), told


def sharded(slip: str) -> Callable[..., Tensor]:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        picked = torch.zeros(labels.shape, dtype=logits.dtype)
        for start in range(0, logits.shape[-1], 4):
            part = logits[..., start : start + 4]
            local, width = labels - start, part.shape[-1]
            mine = (local >= (1 if slip == "lost" else 0)) & (local < width + (slip == "edge"))
            picked = picked + part.gather(-1, local.clamp(0, width - 1)[..., None])[..., 0].masked_fill(~mine, 0)
        each = (logits.logsumexp(-1) - picked).masked_fill(labels == -100, 0)
        return each.sum() / (labels != -100).sum().clamp(min=1)

    return loss


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        ("", ""),
        ("edge", "4, 8 (the multiples of 4 from 4 on), else it is right: the logit of l - 1 is added"),
        ("lost", "0, 4, 8 (the multiples of 4), else it is right: the logit of the label is left out"),
    ],
)
def test_labels_for_which_a_loss_is_wrong_are_said(slip: str, words: str) -> None:
    subject = Subject(kind="loss", forward=lambda _, logits, labels: sharded(slip)(logits, labels),
                      declares={"ignore_index": -100, "shifts_labels": False})  # fmt: skip
    told = loss_opinion(case(subject), Violation("the gradient is not the derivative of the output"))
    assert words in (told or "")
    assert bool(told) == bool(words), told


class Tiled(nn.Module):
    """LayerNorm whose mean is one of tiles, the last of which may be shorter."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.gain, self.size = nn.Parameter(torch.ones(width)), size

    def forward(self, x: Tensor) -> Tensor:
        centre = x - torch.stack([tile.mean(-1) for tile in x.split(self.size, -1)], -1).mean(-1, keepdim=True)
        return self.gain * centre / (centre.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def test_widths_at_which_a_norm_is_wrong_are_said() -> None:
    def told(size: int) -> str | None:
        subject = Subject(kind="norm", build=lambda c: Tiled(c.d_model, size), declares={"norm": "layer"})
        return wrong_widths(case(subject))

    assert "(from 9 on, those that are no multiple of 8)" in (told(8) or "")
    assert "an incomplete tile is counted as a whole one" in (told(8) or "")
    assert told(64) is None


def test_a_clamp_of_buckets_that_comes_too_late_is_named() -> None:
    length = 56
    distance = torch.arange(length)[None] - torch.arange(length)[:, None]
    gap = distance.abs()
    far = 2 + ((gap.clamp(min=1) / 2).log() / torch.tensor(8.0).log() * 2 + 1e-6).long()
    late = ((distance > 0) * 4 + torch.where(gap < 2, gap, far)).clamp(max=7)
    right = (distance > 0) * 4 + torch.where(gap < 2, gap, far.clamp(max=3))
    table = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert "after the offset of the future is added" in (bucket_cause(table[:, late], True, 8, 16) or "")
    assert bucket_cause(table[:, right], True, 8, 16) is None
