"""Right models that look like the faults of bare ones: adapters, towers of products, queries that begin as zeros."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants.adapting import Dropping, adapted, told
from veriformer.tests.mutants.towers import Towers
from veriformer.tests.traps import trap


@trap("T-adapter", "Of the two matrices beside a frozen map one starts at zero")
def adapter() -> Subject:
    return adapted()


@trap("T-dropped-values", "Attention whose products, not its scores, are dropped, behind the softmax")
def dropped_values() -> Subject:
    class Late(Dropping):
        def weigh(self, scores: Tensor) -> Tensor:
            weights = scores.softmax(-1)
            return F.dropout(weights, self.rate, self.training) * 1.0

    return Subject(
        kind="self_attention", build=Late, forward=lambda m, x: m(x), mask_forms=(),
        declares={"causal": True, "positions": "none"},
    )  # fmt: skip


@trap("T-towers-by-dot", "Two towers that compare raw features, of which neither side is normalised")
def towers_by_dot() -> Subject:
    class Dot(Towers):
        def unit(self, x: Tensor) -> Tensor:
            return x

        def other_unit(self, x: Tensor) -> Tensor:
            return x

        def cooled(self, cosines: Tensor) -> Tensor:
            return cosines * self.temperature  # no cosines

    fixed = torch.tensor([[1, 5, 3, 2], [4, 2, 6, 6]])
    return Subject(
        kind="classifier", build=Dot, forward=lambda m, x: m(x, fixed.to(x.device)), mask_forms=(),
        declares={"positions": "none", "pooling": "mean"},
    )  # fmt: skip


class Reading(nn.Module):
    """Learned queries, added to what begins as zeros, read a sequence twice, as in a detector's decoder."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.asked = nn.Parameter(torch.randn(3, c.d_model))
        self.own, self.reads = (
            nn.ModuleList(nn.MultiheadAttention(c.d_model, c.num_heads, batch_first=True) for _ in range(2))
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(2))
        self.out = nn.Linear(c.d_model, 4)

    def forward(self, x: Tensor) -> Tensor:
        asked = self.asked.expand(len(x), -1, -1)
        y = torch.zeros_like(asked)
        for own, reads in zip(self.own, self.reads, strict=True):
            q = y + asked
            y = self.norms[0](y + own(q, q, y, need_weights=False)[0])
            y = self.norms[1](y + reads(y + asked, x, x, need_weights=False)[0])
        return self.out(y).flatten(1)


@trap("T-queries-of-zeros", "Queries begin as zeros, so that the values of a first attention are none")
def queries_of_zeros() -> Subject:
    return Subject(
        kind="classifier", build=Reading, forward=lambda m, x: m(x), inputs="embeddings", mask_forms=(),
        declares={"positions": "none", "structure": "other"},
    )  # fmt: skip


@trap("T-dropout-by-hand", "Dropout written by hand, with a comparison, a product and a quotient")
def dropout_by_hand() -> Subject:
    return told()


class Directed(nn.Module):
    """A classifier of unit vectors, whose classes are directions of several lengths."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.table, self.classes = nn.Embedding(c.vocab_size, c.d_model), nn.Linear(c.d_model, c.num_classes)
        self.mix = nn.MultiheadAttention(c.d_model, c.num_heads, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        labels: Tensor = self.classes(F.normalize((x + self.mix(x, x, x, need_weights=False)[0]).mean(1), dim=-1))
        return labels


@trap("T-unit-before-classes", "A linear map follows unit vectors, which are compared with nothing")
def unit_before_classes() -> Subject:
    return Subject(
        kind="classifier", build=Directed, forward=lambda m, x: m(x), mask_forms=(),
        declares={"positions": "none", "pooling": "mean"},
    )  # fmt: skip


class Insisting(nn.Module):
    """A classifier that must be given its mask, which it holds in float32 whatever the model computes in."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.table, self.heads = nn.Embedding(c.vocab_size, c.d_model), c.num_heads
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.table(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * q.shape[-1] ** -0.5 + (1.0 - mask.float())[:, None, None] * torch.finfo(x.dtype).min
        seen = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        real = mask[..., None].to(x.dtype)
        labels: Tensor = self.out((seen * real).sum(1) / real.sum(1).clamp(min=1))
        return labels


@trap("T-mask-in-float32", "A mask in float32 times the least number of float64 is NaN: the model is one of float32")
def mask_in_float32() -> Subject:
    return Subject(
        kind="classifier", build=Insisting, mask_forms=("padding",),
        forward=lambda m, x, attention_mask=None: m(x, x * 0 + 1 if attention_mask is None else attention_mask),
        declares={"positions": "none", "pooling": "mean"},
    )  # fmt: skip
