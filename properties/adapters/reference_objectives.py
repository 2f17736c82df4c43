"""The reference's losses, masking, schedules and parameter groups."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference import objectives, schedules
from veriformer.reference.config import Config
from veriformer.reference.model import build as build_reference


def next_token(model: Any, logits: Any, labels: Any, label_smoothing: float = 0.0) -> Any:
    """Call the loss that shifts its labels."""
    return objectives.next_token_loss(logits, labels, label_smoothing=label_smoothing)


def plain(model: Any, logits: Any, labels: Any, label_smoothing: float = 0.0) -> Any:
    """Call the loss whose labels stand where they are foretold."""
    return objectives.cross_entropy(logits, labels, label_smoothing=label_smoothing)


def accumulate(model: Any, pairs: Any, label_smoothing: float = 0.0) -> Any:
    """Return the loss of several micro-batches together."""
    return objectives.accumulated_loss(pairs, label_smoothing=label_smoothing)


def mask(model: Any, tokens: Any, seed: int) -> Any:
    """Hide tokens of a vocabulary of 100: 0 to 4 are special, 4 is the mask."""
    generator = torch.Generator().manual_seed(seed)
    return objectives.mask_tokens(tokens, generator, mask_id=4, vocab_size=100, special_ids=(0, 1, 2, 3, 4))


def noam(model: Any, step: int) -> float:
    """Return the rate of a model of 512 channels with 4000 steps of warm-up."""
    return schedules.noam(step, d_model=512, warmup_steps=4000)


def linear(model: Any, step: int) -> float:
    """Return the rate of 100 steps up to 0.001 and 900 down to 0."""
    return schedules.linear(step, peak=1e-3, warmup_steps=100, total_steps=1000)


def cosine(model: Any, step: int) -> float:
    """Return the rate of 100 steps up to 0.001 and 900 down to 0.0001."""
    return schedules.cosine(step, peak=1e-3, warmup_steps=100, total_steps=1000, floor=1e-4)


def build_decoder(config: Any) -> nn.Module:
    """Return a decoder of the drawn sizes, its embeddings tied."""
    return build_reference(
        Config(
            architecture="decoder", vocab_size=config.vocab_size, d_model=config.d_model, num_heads=config.num_heads,
            d_ff=config.d_ff, num_layers=config.num_layers, max_len=config.max_len, positions="learned",
            tied=True,
        )
    )  # fmt: skip


def groups(model: Any) -> Any:
    """Return the parameter groups with a weight decay of 0.1."""
    return schedules.parameter_groups(model, 0.1)


_FALL = {"warmup_steps": 100, "total_steps": 1000, "peak": 1e-3}

SHIPPED = {
    "next-token-loss": Subject(
        kind="loss", name="reference next-token loss", forward=next_token, declares={"shifts_labels": True}
    ),
    "loss": Subject(
        kind="loss",
        name="reference cross-entropy",
        forward=plain,
        accumulate=accumulate,
        declares={"shifts_labels": False},
    ),
    "smoothed-loss": Subject(
        kind="loss",
        name="reference smoothed cross-entropy",
        forward=partial(plain, label_smoothing=0.1),
        accumulate=partial(accumulate, label_smoothing=0.1),
        declares={"shifts_labels": False, "label_smoothing": 0.1},
    ),
    "masking": Subject(
        kind="masking",
        name="reference masking",
        forward=mask,
        config=DrawnConfig(vocab_size=100),
        declares={"mask_id": 4, "special_ids": (0, 1, 2, 3)},
    ),
    "noam": Subject(
        kind="schedule",
        name="reference Noam schedule",
        forward=noam,
        config=DrawnConfig(d_model=512),
        declares={"schedule": "noam", "warmup_steps": 4000},
    ),
    "linear": Subject(
        kind="schedule", name="reference linear schedule", forward=linear, declares={"schedule": "linear", **_FALL}
    ),
    "cosine": Subject(
        kind="schedule",
        name="reference cosine schedule",
        forward=cosine,
        declares={"schedule": "cosine", "floor": 1e-4, **_FALL},
    ),
    "parameter-groups": Subject(
        kind="parameter_groups", name="reference parameter groups", build=build_decoder, forward=groups
    ),
}
