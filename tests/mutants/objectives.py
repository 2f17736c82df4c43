"""Faults of losses, masking, schedules and parameter groups."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.adapters.reference_objectives import SHIPPED, accumulate, build_decoder, groups, mask, plain
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference import schedules
from veriformer.reference.objectives import cross_entropy, shifted
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put


def right_loss(smoothing: float = 0.0, shifts: bool = False, empty: str = "") -> Any:
    def forward(model: Any, x: Tensor, y: Tensor) -> Tensor:
        value = cross_entropy(x, shifted(y) if shifts else y, label_smoothing=smoothing)
        return value if bool((y != -100).any()) or empty != "nan" else value * math.nan

    return forward


def loss(forward: Any, accumulated: Any = None, **declares: Any) -> Subject:
    facts = (declares.get("label_smoothing", 0.0), declares.get("shifts_labels", False), declares.get("empty_loss", ""))
    forward, accumulated = put((forward, accumulated), instead_of=(right_loss(*facts), accumulated and accumulate))
    return Subject(kind="loss", forward=forward, accumulate=accumulated, declares=declares)


@fault(
    "LS01",
    "Labels shifted twice",
    killed_by=("loss.shift", "loss.definition"),
    cause="moved",
)
def twice() -> Subject:
    return loss(lambda m, x, y: cross_entropy(x[:, :-1], shifted(y)[:, 1:]), shifts_labels=True)


@fault(
    "LS-unshifted",
    "Labels are never shifted",
    killed_by=("loss.shift", "loss.definition"),
    cause="labels are not moved",
)
def never() -> Subject:
    return loss(lambda m, x, y: cross_entropy(x, y), shifts_labels=True)


@fault(
    "LS-joined",
    "Labels are shifted after samples were joined, so that the last token of one is to predict the first of the next",
    killed_by=("loss.definition",),
    cause="moved after samples were joined",
)
def shifted_when_flat() -> Subject:
    def forward(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(x.flatten(0, 1)[None], shifted(y.flatten()[None]))

    return loss(forward, shifts_labels=True)


@fault(
    "LS03", "Smoothing counts ignored targets", killed_by=("loss.label-smoothing",), cause="the target in the gradient"
)
def smooth_ignored() -> Subject:
    def forward(model: Any, x: Tensor, y: Tensor) -> Tensor:
        log_p = x.log_softmax(-1)
        hard = F.nll_loss(log_p.flatten(0, 1), y.flatten())
        return 0.9 * hard - 0.1 * log_p.mean()

    return loss(forward, label_smoothing=0.1, empty_loss="nan")


@fault("LS04", "The ignored label is -1 here and -100 there", killed_by=("loss.definition",), cause="label -1|ignored")
def other_label() -> Subject:
    def forward(model: Any, x: Tensor, y: Tensor) -> Tensor:
        counted = (y != -1).double()
        per = F.cross_entropy(x.flatten(0, 1), y.clamp(min=0).flatten(), reduction="none").view_as(y)
        return (per * counted).sum() / counted.sum()

    return loss(forward)


@fault(
    "LS06",
    "The smoothed loss is divided by all rows, padding among them",
    killed_by=("loss.definition", "loss.label-smoothing"),
    cause="divided by all positions",
)
def all_rows() -> Subject:
    return loss(lambda m, x, y: cross_entropy(x, y, label_smoothing=0.1, num_items=y.numel()), label_smoothing=0.1)


@fault(
    "LS07", "A batch of padding divides by zero", killed_by=("loss.range",), cause="where nothing is to be predicted"
)
def of_nothing() -> Subject:
    subject = loss(lambda m, x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()))
    return subject.with_facts(empty_loss="zero")


@fault("LS12", "The accumulated loss is a mean of means", killed_by=("loss.accumulation",), cause="micro-batches")
def mean_of_means() -> Subject:
    return loss(plain, lambda m, pairs: torch.stack([plain(m, x, y) for x, y in pairs]).mean())


@fault("LS12b", "The accumulated loss is not divided", killed_by=("loss.accumulation",), cause="micro-batches")
def not_divided() -> Subject:
    return loss(plain, lambda m, pairs: torch.stack([accumulate(m, [pair]) for pair in pairs]).sum())


@fault(
    "LS13",
    "Softmax before the cross-entropy",
    killed_by=("loss.definition",),
    cause="probabilities",
)
def softmax_first() -> Subject:
    return loss(lambda m, x, y: cross_entropy(x.softmax(-1), y))


@fault("LS-log", "log(softmax(x)) overflows", killed_by=("loss.range",), cause="the loss is NaN or infinite")
def unstable() -> Subject:
    return loss(lambda m, x, y: cross_entropy(x.exp().div(x.exp().sum(-1, keepdim=True)).log(), y))


def masking(forward: Any) -> Subject:
    return Subject(
        kind="masking", forward=put(forward, instead_of=mask), config=DrawnConfig(vocab_size=100),
        declares={"mask_id": 4, "special_ids": (0, 1, 2, 3)},
    )  # fmt: skip


@fault("LS09", "The split is not 80/10/10", killed_by=("masking.mlm",), cause="masked is not 0.8|replaced")
def wrong_split() -> Subject:
    def forward(model: Any, tokens: Tensor, seed: int) -> Any:
        inputs, labels = mask(model, tokens, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        chosen = labels != -100
        inputs = torch.where(chosen & (torch.rand(tokens.shape, generator=generator) < 0.8), 4, labels)
        inputs = torch.where(chosen, inputs, tokens)
        words = torch.randint(100, tokens.shape, generator=generator)
        return torch.where(chosen & (torch.rand(tokens.shape, generator=generator) < 0.1), words, inputs), labels

    return masking(forward)


@fault("LS10", "Positions are drawn with replacement", killed_by=("masking.mlm",), cause="tokens chosen")
def with_replacement() -> Subject:
    def forward(model: Any, tokens: Tensor, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        ordinary = (tokens > 4).flatten().nonzero().flatten()
        drawn = torch.randint(len(ordinary), (int(0.15 * len(ordinary)),), generator=generator)
        chosen = torch.zeros(tokens.numel(), dtype=torch.bool)
        chosen[ordinary[drawn]] = True
        chosen = chosen.view_as(tokens)
        fate = torch.rand(tokens.shape, generator=generator)
        inputs = torch.where(chosen & (fate < 0.8), 4, tokens)
        words = torch.randint(100, tokens.shape, generator=generator)
        return torch.where(chosen & (fate >= 0.9), words, inputs), torch.where(chosen, tokens, -100)

    return masking(forward)


@fault("LS15", "Special tokens are hidden too", killed_by=("masking.mlm",), cause="a special token is to be predicted")
def specials_hidden() -> Subject:
    from veriformer.reference.objectives import mask_tokens

    def forward(model: Any, tokens: Tensor, seed: int) -> Any:
        return mask_tokens(tokens, torch.Generator().manual_seed(seed), mask_id=4, vocab_size=100)

    return masking(forward)


@fault(
    "masking-columns",
    "The places to hide are drawn once for all samples",
    killed_by=("masking.mlm",),
    cause="the same places are hidden in every sample",
)
def columns_hidden() -> Subject:
    def forward(model: Any, tokens: Tensor, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        chosen = (torch.rand(tokens.shape[1], generator=generator) < 0.15) & (tokens > 4)
        fate = torch.rand(tokens.shape, generator=generator)
        words = torch.randint(5, 100, tokens.shape, generator=generator)
        inputs = torch.where(chosen & (fate < 0.8), 4, tokens)
        return torch.where(chosen & (fate >= 0.9), words, inputs), torch.where(chosen, tokens, -100)

    return masking(forward)


def schedule(forward: Any, like: str) -> Subject:
    shipped = SHIPPED[like]
    forward = put(forward, instead_of=shipped.forward)
    return Subject(kind="schedule", forward=forward, config=shipped.config, declares=shipped.declares)


@fault("OP01", "The first rate is 0", killed_by=("schedule.warmup",), cause="wasted")
def nothing_at_first() -> Subject:
    def forward(model: Any, step: int) -> float:
        return 512**-0.5 * min(step**-0.5, step * 4000**-1.5) if step else 0.0

    return schedule(forward, "noam")


@fault("OP02", "A rate of infinity at step 0", killed_by=("schedule.warmup",), cause="step 0")
def infinite() -> Subject:
    def forward(model: Any, step: int) -> float:
        return 512**-0.5 * (step**-0.5 if step else math.inf) if step < 1 else schedules.noam(
            step, d_model=512, warmup_steps=4000
        )  # fmt: skip

    return schedule(forward, "noam")


@fault("OP-exponent", "The warm-up rises with w^-0.5", killed_by=("schedule.warmup",), cause="the rise")
def wrong_exponent() -> Subject:
    def forward(model: Any, step: int) -> float:
        return 512**-0.5 * min(max(step, 1) ** -0.5, max(step, 1) * 4000**-0.5)

    return schedule(forward, "noam")


@fault("OP-again", "The cosine rises again past the end", killed_by=("schedule.cosine",), cause="past the end")
def rises_again() -> Subject:
    def forward(model: Any, step: int) -> float:
        u = (step - 100) / 900
        return 1e-3 * (step + 1) / 101 if step < 100 else 1e-4 + 9e-4 * (1 + math.cos(math.pi * u)) / 2

    return schedule(forward, "cosine")


@fault("OP-negative", "The line goes on below zero", killed_by=("schedule.linear",), cause="past the end")
def below_zero() -> Subject:
    def forward(model: Any, step: int) -> float:
        return 1e-3 * (step + 1) / 101 if step < 100 else 1e-3 * (1000 - step) / 900

    return schedule(forward, "linear")


@fault("OP04", "Norms decay since their names do not match", killed_by=("schedule.decay-groups",), cause="decays")
def norms_decay() -> Subject:
    def forward(model: nn.Module) -> Any:
        plain_names = [p for n, p in model.named_parameters() if "bias" in n or "LayerNorm.weight" in n]
        rest = [p for n, p in model.named_parameters() if not ("bias" in n or "LayerNorm.weight" in n)]
        return [{"params": rest, "weight_decay": 0.1}, {"params": plain_names, "weight_decay": 0.0}]

    return Subject(kind="parameter_groups", build=build_decoder, forward=put(forward, instead_of=groups))


@fault("OP-lost", "A parameter stands in no group", killed_by=("schedule.decay-groups",), cause="stands in no group")
def lost() -> Subject:
    def forward(model: nn.Module) -> Any:
        return [{"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1}]

    return Subject(kind="parameter_groups", build=build_decoder, forward=put(forward, instead_of=groups))
