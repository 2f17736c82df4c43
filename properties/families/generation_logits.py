"""The logits that generation chooses from, step by step: finer than the tokens; part of `decoding.generate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.case import Case


def generated(
    case: Case, built: Built, tokens: Tensor, steps: int, *, use_cache: bool
) -> tuple[Tensor, list[Tensor] | None]:
    """Generate, and watch what the model gives at each step.

    Args:
        case: it stands in.
        built: the model.
        tokens: int64 `[B, T]`, the prompt.
        steps: tokens to append.
        use_cache: how.

    Returns:
        Tokens `[B, T + steps]`; and for each step the logits `[B, V]` that its token is the best of, or None where the
        model is called otherwise than once a step, or something else is chosen than its best token.

    Raises:
        SubjectError: it returned something else.
    """
    calls: list[Tensor] = []

    def keep(_module: nn.Module, _given: Any, output: Any) -> None:
        calls.extend(t[:, -1].detach().double() for t in _logits(output, len(tokens)))

    module = built.module
    handle = module.register_forward_hook(keep) if isinstance(module, nn.Module) else None
    try:
        got = case.ask("generate", tokens, steps, use_cache, built=built)
    finally:
        if handle is not None:
            handle.remove()
    length = tokens.shape[1]
    if not isinstance(got, Tensor) or got.shape != (len(tokens), length + steps):
        raise SubjectError("generate did not return tokens [B, T + steps]")
    fits = len(calls) == steps and all(
        torch.equal(row.argmax(-1).to(got.device), got[:, length + step].long()) for step, row in enumerate(calls)
    )
    return got, calls if fits else None


def _logits(output: Any, samples: int) -> Iterator[Tensor]:
    """Yield the first tensor of what a model returned that may be logits `[B, T, V]`."""
    if isinstance(output, Tensor):
        if output.ndim == 3 and len(output) == samples and output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        yield from _logits(tuple(output.values()), samples)
    elif isinstance(output, tuple | list):
        for item in output:
            if found := list(_logits(item, samples)):
                yield found[0]
                return
