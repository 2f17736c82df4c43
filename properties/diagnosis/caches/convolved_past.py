"""Convolutions over time that are decoded chunk by chunk: whether the frames before a chunk are the last ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked
from veriformer.properties.diagnosis.caches.runs import CachedRuns


def convolved_past_cause(runs: CachedRuns, sizes: Sequence[int]) -> str | None:
    """Name a convolution that is given other past frames with the cache than without, and the right new ones.

    Args:
        runs: a subject with a cache.
        sizes: of the chunks.
    """
    x = runs.tokens(2, sum(sizes))
    whole, cached = runs.clean(), runs.clean()
    every = _given(whole.module, lambda: runs.call(whole, x))
    steps = _given(cached.module, lambda: runs.cached(x, sizes, on=cached))
    for name, (full,) in ((name, own) for name, own in every.items() if len(own) == 1):
        chunks = steps.get(name, [])
        kernel = full.shape[-1] - x.shape[1] + 1
        if len(chunks) != len(sizes) or kernel < 2:
            continue
        start = 0
        for number, (chunk, size) in enumerate(zip(chunks, sizes, strict=True)):
            wanted = full[..., start : start + size + kernel - 1]
            if chunk.shape != wanted.shape:
                break
            wrong = ((chunk - wanted).abs() > 1e-5 * full.abs().max()).flatten(0, -2).any(0)
            if bool(wrong[kernel - 1 :].any()):
                break  # its new frames are wrong already
            if bool(wrong.any()):
                places = wrong.nonzero().flatten().tolist()
                zeros = bool((chunk[..., places] == 0).all())
                kind = type(runs.built.module.get_submodule(name)).__name__
                return (
                    f"in chunk {number + 1}, behind {start} cached tokens, {name} ({kind}) is given {len(places)} of "
                    f"its {kernel - 1} past frames wrong{' (zeros)' if zeros else ''}: what is kept for it is not the "
                    f"last {kernel - 1} frames of all that went before, as where it is cut from the newest chunk alone"
                )
            start += size
    return None


def _given(module: Any, call: Callable[[], object]) -> dict[str, list[Tensor]]:
    """Return what every convolution of a model is given, `[B, C, T]`, call by call."""
    found: dict[str, list[Tensor]] = {}
    if not isinstance(module, nn.Module):
        return found

    def note(name: str) -> Callable[..., None]:
        return lambda _, args: found.setdefault(name, []).append(args[0].detach().clone())

    parts = [(name, p) for name, p in module.named_modules() if isinstance(p, nn.Conv1d) and max(p.kernel_size) > 1]
    with hooked(part.register_forward_pre_hook(note(name)) for name, part in parts), torch.no_grad():
        call()
    return found
