"""Right losses, maskings, schedules and depths that look wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference import schedules
from veriformer.tests.traps import trap


@trap("noam-from-zero", "A scheduler counts its steps from 0")
def from_zero() -> Subject:
    return Subject(
        kind="schedule",
        forward=lambda m, step: schedules.noam(step + 1, d_model=512, warmup_steps=400),
        config=DrawnConfig(d_model=512),
        declares={"schedule": "noam", "warmup_steps": 400},
    )


@trap("noam-factor", "A learning rate times a factor, of a model whose width is not told")
def with_factor() -> Subject:
    return Subject(
        kind="schedule",
        forward=lambda m, step: torch.tensor(
            2 * schedules.noam(step, d_model=300, warmup_steps=7), dtype=torch.float32
        ),
        declares={"schedule": "noam", "warmup_steps": 7},
    )


@trap("masking-exact", "Exactly 15 % of the tokens are chosen, not each with 15 %")
def exact_share() -> Subject:
    def forward(model: Any, tokens: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ordinary = (tokens > 4).flatten().nonzero().flatten()
        order = torch.randperm(len(ordinary), generator=generator)[: round(0.15 * len(ordinary))]
        chosen = torch.zeros(tokens.numel(), dtype=torch.bool)
        chosen[ordinary[order]] = True
        chosen = chosen.view_as(tokens)
        fate = torch.rand(tokens.shape, generator=generator)
        inputs = torch.where(chosen & (fate < 0.8), 4, tokens)
        words = torch.randint(5, 100, tokens.shape, generator=generator)  # no special among the random ones
        return torch.where(chosen & (fate >= 0.9), words, inputs), torch.where(chosen, tokens, -100)

    return Subject(
        kind="masking", forward=forward, config=DrawnConfig(vocab_size=100),
        declares={"mask_id": 4, "special_ids": (0, 1, 2, 3)},
    )  # fmt: skip


@trap("T24", "Stochastic depth without the division by what is kept", "huggingface/pytorch-image-models#2118")
def unscaled_depth() -> Subject:
    class DropPath(nn.Module):
        drop_prob = 0.3

        def forward(self, x: Tensor) -> Tensor:
            keep = torch.rand(len(x), *(1,) * (x.ndim - 1)) >= self.drop_prob
            return x * keep if self.training else x

    class Network(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner, self.drop_path = nn.Linear(width, width), DropPath()

        def forward(self, x: Tensor) -> Tensor:
            return self.drop_path(self.inner(x).relu())

    return Subject(
        kind="feed_forward", build=lambda c: Network(c.d_model), forward=lambda m, x: m(x),
        declares={"drop_path_scaled": False},
    )  # fmt: skip


@trap("tokenizer-normalises", "A tokenizer that folds case and spaces does not give the text back")
def folds() -> Subject:
    words = ["[UNK]", "hello", "world", *"abcdefghijklmnopqrstuvwxyz"]

    def encode(model: Any, text: str) -> list[int]:
        return [words.index(word) if word in words else 0 for word in text.lower().split()]

    return Subject(
        kind="tokenizer",
        forward=encode,
        decode=lambda m, ids: " ".join(words[i] for i in ids),
        declares={"reversible": False, "unknown_id": 0},
    )


@trap("loss-smoothed", "Label smoothing over the other K - 1 classes is the usual one with another eps")
def smoothed_over_the_others() -> Subject:
    def forward(model: Any, logits: Tensor, labels: Tensor) -> Tensor:
        classes = logits.shape[-1]
        eps = 0.1 * (classes - 1) / classes  # so that 1 - eps stays at the label and eps / (K - 1) elsewhere
        log_p = logits.log_softmax(-1)
        counted = labels != -100
        own = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        others = (log_p.sum(-1) - own) / (classes - 1)
        loss = -((1 - eps) * own + eps * others)
        return (loss * counted).sum() / counted.sum().clamp(min=1)

    return Subject(kind="loss", forward=forward, declares={"label_smoothing": 0.1, "shifts_labels": False})


@trap("loss-z-unsmoothed", "A z-loss beside a cross-entropy without smoothing: the gradient holds more than the target")
def z_loss_unsmoothed() -> Subject:
    def forward(model: Any, logits: Tensor, labels: Tensor) -> Tensor:
        counted = labels != -100
        total = logits.logsumexp(-1)
        own = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        loss = total - own + 0.01 * total.square()
        return (loss * counted).sum() / counted.sum().clamp(min=1)

    return Subject(
        kind="loss", forward=forward, declares={"z_loss": 0.01, "label_smoothing": 0.0, "shifts_labels": False}
    )
