"""The logits that generation chooses from, step by step: finer than the tokens; part of `decoding.generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.case import Case


def generated(case: Case, built: Built, tokens: Tensor, steps: int, *, use_cache: bool) -> tuple[Tensor, Tensor | None]:
    """Generate, and watch what the model gives at each step.

    Args:
        case: it stands in.
        built: the model.
        tokens: int64 `[B, T]`, the prompt.
        steps: tokens to append.
        use_cache: how.

    Returns:
        Tokens `[B, T + steps]`; and the logits `[B, steps, V]` that each of the new ones is the best of, or None where
        the model is called otherwise than once a step, or something else is chosen than its best token.

    Raises:
        SubjectError: it returned something else.
    """
    run = case.caller(built, part="generate")
    got, rows = case.apply(watched, run, built.module, tokens, steps, use_cache)
    length = tokens.shape[1]
    if not isinstance(got, Tensor) or got.shape != (len(tokens), length + steps):
        raise SubjectError("generate did not return tokens [B, T + steps]")
    best = rows.argmax(-1).to(got.device)
    fits = best.shape == (len(tokens), steps) and torch.equal(best, got[:, length:].long())
    return got, rows if fits else None


def watched(run: Callable[..., Any], module: Any, tokens: Tensor, steps: int, use_cache: bool) -> tuple[Any, Tensor]:
    """Generate; also return the last logits `[B, calls, V]` of every call of the model on the way, float64."""
    rows: list[Tensor] = []

    def keep(_module: Any, _given: Any, output: Any) -> None:
        if (logits := logits_in(output, len(tokens))) is not None:
            rows.append(logits[:, -1].detach().double())

    handle = module.register_forward_hook(keep) if isinstance(module, nn.Module) else None
    try:
        got = run(tokens, steps, use_cache)
    finally:
        if handle is not None:
            handle.remove()
    return got, torch.stack(rows, dim=1) if rows else torch.zeros(len(tokens), 0, 1)


def logits_in(output: Any, samples: int) -> Tensor | None:
    """Return the first tensor of what a model returned that may be logits `[B, T, V]`."""
    if isinstance(output, Tensor):
        return output if output.ndim == 3 and len(output) == samples and output.is_floating_point() else None
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        found = (logits_in(item, samples) for item in output)
        return next((logits for logits in found if logits is not None), None)
    return None
