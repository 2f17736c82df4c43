"""Every token of a vocabulary is another one to a model; part of `causality.first-token`."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream

_TOKENS = 2048
"""Tokens of a vocabulary that are told apart at once, at most."""


def every_token_counts(case: Case, stream: Stream) -> None:
    """Ask where two tokens of the vocabulary are one to the model: the ends of a part of it, say."""
    size = stream.built.config.vocab_size
    if not case.subject.takes_tokens or size > _TOKENS or case.subject.fact("structure") == "other" or case.is_in_half:
        return
    tokens = torch.arange(size, device=case.bench.device)[:, None]
    alike = case.apply(pair_alike, stream(tokens)[:, 0])
    first, second = (int(n) for n in alike)
    case.require(
        (alike < 0).all(),
        f"tokens {first} and {second} give one and the same output, alone",
        got=f"the same for {first} and {second}",
        expected=f"another one for each of {size} tokens",
        cause=lambda: f"tokens {first} and {second} are embedded alike",
        asks=("structure", "other"),
    )


def pair_alike(outputs: Tensor) -> Tensor:
    """Return two rows of outputs `[V, *]` that are equal to the bit; -1 and -1 if none are."""
    _, group, count = torch.unique(outputs.detach(), dim=0, return_inverse=True, return_counts=True)
    if int(count.max()) < 2:
        return torch.tensor([-1, -1])
    return (group == int(count.argmax())).nonzero().flatten()[:2].cpu()
