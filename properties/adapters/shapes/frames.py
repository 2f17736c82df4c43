"""Encoders of frames that give fewer than they take (strided convolutions): how a sequence is made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.unknown.arguments import Argument
from veriformer.properties.adapters.unknown.understanding import Understood
from veriformer.properties.adapters.unknown.wiring import Wiring

_LENGTHS = r"(\w+_)?(lengths?|lens?)|\w*(num|n)_frames"
_FEWEST = (1, 2, 3, 5, 7, 9, 11, 15, 16, 23, 31, 32, 47, 64, 100, 128)  # frames that a first output may need
_ROWS = 3


def of_frames(sample: nn.Module, arguments: Sequence[Argument]) -> Understood | None:
    """Return the call of an encoder that takes frames `[B, N, F]` and gives fewer of them `[B, N', D]`; None of others.

    Each position of a sequence becomes as many frames as nearly make one, behind a few empty ones; what comes out is
    summed up, so that a frame too many, or too few, shows as another sum. With lengths those of real frames are given.
    """
    convolutions = [m for m in sample.modules() if isinstance(m, nn.Conv1d | nn.Conv2d)]
    if not any(max(m.stride) > 1 for m in convolutions):
        return None
    lengths = next((a for a in arguments[1:] if re.fullmatch(_LENGTHS, a.name.lower())), None)
    if any(a.is_required and a is not lengths for a in arguments[1:]):
        return None
    for features in _widths(sample):
        run = lambda n, features=features: _called(sample, n, features, lengths)  # noqa: E731
        fewest = next((n for n in _FEWEST if run(n) is not None), None)
        if fewest is None:
            continue
        short, long = run(16 + fewest), run(48 + fewest)
        if short is None or long is None or not 0 < long - short < 32:
            return None
        return _wired(sample, features, lengths, lead=fewest + 1, stride=round(32 / (long - short)))
    return None


def _widths(sample: nn.Module) -> list[int]:
    """Return how many features a frame may have: what the first convolution or linear map takes, then the usual."""
    found = [m.in_channels for m in sample.modules() if isinstance(m, nn.Conv1d)]
    found += [m.in_features for m in sample.modules() if isinstance(m, nn.Linear)]
    return list(dict.fromkeys([*found[:2], 80, 40, 64, 128]))


def _called(sample: nn.Module, count: int, features: int, lengths: Argument | None) -> int | None:
    """Return how many frames come out of as many; None where the model does not take them."""
    frames = torch.randn(_ROWS, count, features, generator=torch.Generator().manual_seed(0))
    given = {lengths.name: torch.full((_ROWS,), count)} if lengths is not None else {}
    try:
        with torch.no_grad():
            made = _first(sample(frames, **given))
    except Exception:
        return None
    return made.shape[1] if made is not None and made.ndim == 3 and len(made) == _ROWS else None


def _first(output: Any) -> Tensor | None:
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) and output.is_floating_point() else None


def _wired(sample: nn.Module, features: int, lengths: Argument | None, *, lead: int, stride: int) -> Understood:
    each = max(stride - 1 + stride % 2, 1)  # odd: padding ends at every place between two outputs
    before = [
        f"frames = x[:, :, torch.arange({features}, device=x.device) % x.shape[-1]].repeat_interleave({each}, dim=1)",
        f"frames = torch.nn.functional.pad(frames, (0, 0, {lead}, 0))",
    ]
    given: dict[str, str] = {"*first": "frames"}
    masks: tuple[str, ...] = ()
    if lengths is not None:
        masks = ("attention_mask",)
        before += [
            "real = x.new_ones(x.shape[:2]) if attention_mask is None else attention_mask",
            f"lengths = {lead} + {each} * real.long().sum(1)",
        ]
        given[lengths.name] = "lengths"
    pick, around = _summed(sample, features, lengths)
    notes = [
        f"takes frames of {features} features and gives one for about {stride}: each position is given as {each} "
        f"behind {lead} empty ones, and the sum of what comes out is judged, as of a classifier"
    ]
    notes += [f"{lengths.name} counts the frames of real positions"] if lengths is not None else []
    return Understood(
        "classifier", Wiring(("x",), given, tuple(before), pick, masks=masks, around=around), "embeddings",
        ("padding",) if lengths is not None else (), tuple(notes),
        declares={"padding_side": "right"} if lengths is not None else {},
    )  # fmt: skip


def _summed(sample: nn.Module, features: int, lengths: Argument | None) -> tuple[str, str]:
    """Return how the frames that count are summed: by the numbers of frames that come out beside them, if any do."""
    count = max(_FEWEST) if _called(sample, 60, features, lengths) is None else 60
    frames = torch.randn(_ROWS, count, features, generator=torch.Generator().manual_seed(0))
    given = {lengths.name: torch.full((_ROWS,), count)} if lengths is not None else {}
    with torch.no_grad():
        output = sample(frames, **given)
    if isinstance(output, Tensor):
        return ".sum(1)", ""
    for at, part in enumerate(output[1:], 1):
        if isinstance(part, Tensor) and part.shape == (_ROWS,) and not part.is_floating_point():
            counted = f"(torch.arange(made[0].shape[1], device=made[0].device) < made[{at}][:, None])[..., None]"
            return "", f"(lambda made: (made[0] * {counted}).sum(1))"
    return "[0].sum(1)", ""
