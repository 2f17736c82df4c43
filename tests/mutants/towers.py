"""Faults of two towers: texts that are compared with a few other ones, which are always the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put_class


class Towers(nn.Module):
    """Questions and answers, each by an encoder of its own; their cosines over a learned temperature."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(c.vocab_size, c.d_model)
        self.asks, self.answers = (
            nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.last = nn.Linear(c.d_model, 6)
        self.temperature = nn.Parameter(torch.tensor(0.2))

    def unit(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)

    def other_unit(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)

    def cooled(self, cosines: Tensor) -> Tensor:
        return cosines / self.temperature

    def forward(self, questions: Tensor, answers: Tensor) -> Tensor:
        q = self.unit(self.last(self.asks(self.table(questions)).mean(1)))
        a = self.other_unit(self.last(self.answers(self.table(answers)).mean(1)))
        return self.cooled(torch.einsum("nd,md->nm", q, a))


def towers(part: type[Towers] = Towers) -> Subject:
    fixed = torch.tensor([[1, 5, 3, 2], [4, 2, 6, 6], [3, 3, 1, 5]])
    return Subject(
        kind="classifier", build=put_class(part), forward=lambda m, x: m(x, fixed.to(x.device)), mask_forms=(),
        declares={"positions": "none", "pooling": "mean"},
    )  # fmt: skip


@fault(
    "towers-one-unit",
    "The features of one tower alone are normalised before they are compared",
    killed_by=("anatomy.scale",),
    cause="not divided each by its own norm",
)
def one_unit() -> Subject:
    class One(Towers):
        def other_unit(self, x: Tensor) -> Tensor:
            return x

    return towers(One)


@fault(
    "towers-temperature",
    "Cosines are multiplied by the temperature",
    killed_by=("anatomy.scale",),
    cause="not divided by it",
)
def heated() -> Subject:
    class Heated(Towers):
        def cooled(self, cosines: Tensor) -> Tensor:
            return cosines * self.temperature

    return towers(Heated)


@fault(
    "towers-batch-norm",
    "The features of a tower are divided by the norm of the whole batch",
    killed_by=("batch.independence",),
    cause="of all samples|number of samples",
)
def of_the_batch() -> Subject:
    class Whole(Towers):
        def unit(self, x: Tensor) -> Tensor:
            return x / x.norm()

    return towers(Whole)
