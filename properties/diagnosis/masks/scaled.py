"""Whether hidden content enters as a factor of whole rows: through a normaliser alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked
from veriformer.properties.diagnosis.masks.masked import Masked


def scaled_cause(masked: Masked, x: Tensor, mask: Tensor) -> str | None:
    """Say that real rows are scaled by one factor, of a row or of each head of a row, where hidden content enters."""
    other = torch.where(mask[..., None] if x.ndim == 3 else mask, x, masked.stream.other(x))
    one, two = _tensors(masked, x, mask), _tensors(masked, other, mask)
    real = mask[0].cpu()
    for (name, before), (again, after) in zip(one, two, strict=False):
        if name != again or before.shape != after.shape:
            return None
        before, after = before[real], after[real]
        if float((after - before).abs().max()) <= 1e-6 * float(before.abs().max()):
            continue
        for parts, whose in ((1, "a row"), (masked.built.config.num_heads, "a row and head")):
            if before.shape[-1] % parts or before.shape[-1] // parts < 2:
                continue
            ratio = (after / before).unflatten(-1, (parts, -1))
            if float((ratio / ratio.mean(-1, keepdim=True) - 1).abs().max()) < 1e-4:
                return (
                    f"at {name} each real row is scaled by one factor {whose} when hidden content is replaced, and is "
                    "otherwise the same: what is hidden is left out of the sum, not of the normaliser that divides it"
                )
        return None
    return None


def normaliser_cause(masked: Masked, x: Tensor, mask: Tensor) -> str | None:
    """Say that hidden keys enter through the normaliser alone, read off the outputs of one head.

    What one head mixes is then the right mixture times a factor that hidden content moves. A map behind it leaves three
    such outputs on one line: the right one, and two with other hidden content.
    """
    if masked.case.subject.kind not in ("self_attention", "cross_attention"):
        return None
    one_head = replace(masked.built.config, num_heads=1, num_key_value_heads=1)
    built = masked.case.bench.pool.fresh(one_head, masked.built.dtype, raw=masked.built.is_raw)
    real = mask[0].cpu()
    other = torch.where(mask[..., None] if x.ndim == 3 else mask, x, masked.stream.other(x))
    right = masked(x[:, real], None, built)
    first, second = (
        y[:, real] if masked.per_position else y for y in (masked(x, mask, built), masked(other, mask, built))
    )
    if first.shape != right.shape or first.shape[-1] < 4:
        return None
    missing, moved = (right - first).double().flatten(0, -2), (first - second).double().flatten(0, -2)
    least = masked.limit(right)
    rows = (missing.abs().amax(-1) > 10 * least) & (moved.abs().amax(-1) > 10 * least)
    if not bool(rows.any()):
        return None
    along = torch.cosine_similarity(missing[rows], moved[rows], dim=-1).abs()
    if float(along.min()) < 1 - 1e-6:
        return None
    return (
        "with one head the outputs are the right mixture times a factor that hidden content moves: what the mask hides "
        "is left out of the sum of values, not of the normaliser that divides it (the mask comes behind the softmax, "
        "or behind its sum)"
    )


def _tensors(masked: Masked, x: Tensor, mask: Tensor) -> list[tuple[str, Tensor]]:
    """Return `[T, D]` of all that modules are given and give, in order."""
    built = masked.clean()
    found: list[tuple[str, Tensor]] = []
    if not isinstance(built.module, nn.Module):
        return found

    def note(place: str, value: Any) -> None:
        fits = isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3
        if fits and value.shape[:2] == x.shape[:2]:
            found.append((place, value[0].detach().double().cpu()))

    hooks = []
    for name, part in built.module.named_modules():
        label = f"{name} ({type(part).__name__})" if name else type(part).__name__

        def before(_: nn.Module, args: Any, label: str = label) -> None:
            for value in args:
                note(f"the input of {label}", value)

        def after(_: nn.Module, __: Any, output: Any, label: str = label) -> None:
            note(f"the output of {label}", output)

        hooks += [part.register_forward_pre_hook(before), part.register_forward_hook(after)]
    with hooked(hooks):
        masked(x, mask, built)
    return found
