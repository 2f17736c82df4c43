"""What a normalization layer computes, read off its answers: gain, bias, epsilon, and whether it subtracts the mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.engine.case import Case

LARGE = 2.0**13
"""Scale at which an epsilon of up to 1e-3 changes nothing: 1e-3 / 2^26 is 1e-11."""

_SMALL = (2.0**-8, 2.0**-13, 2.0**-18)
"""Scales at which the usual epsilons, 1e-5 to 1e-12, halve the output."""


@dataclass(frozen=True)
class NormModel:
    """y = gain * n(x) + bias with n(x) = (x - m) / sqrt(v + eps).

    Attributes:
        centred: whether m is the mean (LayerNorm) rather than 0 (RMSNorm).
        gain: `[D]` float64.
        bias: `[D]` float64.
        eps: inside the root, float64.
    """

    centred: bool
    gain: Tensor
    bias: Tensor
    eps: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return what the formula gives for x `[..., D]`, float64."""
        return self.gain * normalised(x, self.centred, self.eps) + self.bias


def normalised(x: Tensor, centred: bool, eps: Tensor | float) -> Tensor:
    """Return (x - m) / sqrt(v + eps), float64."""
    x = x.double()
    if centred:
        x = x - x.mean(dim=-1, keepdim=True)
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def is_centred(case: Case, built: Built) -> bool:
    """Return whether the mean is subtracted: as declared, else as seen (a constant on a token changes nothing)."""
    declared = case.subject.fact("norm")
    if declared in ("layer", "rms"):
        return bool(declared == "layer")
    x = _spread(case, built)
    moved = case.call(built, x + 2.0 * LARGE) - case.call(built, x)
    return float(moved.double().abs().mean()) < 0.05


def _spread(case: Case, built: Built) -> Tensor:
    """Return one token `[1, 1, D]` whose every channel is away from zero and from the mean."""
    width = built.config.d_model
    signs = torch.where(torch.arange(width) % 2 == 0, 1.0, -1.0).double()
    sizes = 1 + 0.5 * torch.rand(width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    scale = 2.0**5 if built.dtype == torch.float16 else LARGE  # float16 ends at 65504
    return (signs * sizes * scale).to(case.bench.device, built.dtype)[None, None]


def read_off(case: Case, built: Built, centred: bool | None = None) -> NormModel:
    """Find gain, bias and epsilon from answers: n is odd, so f(x) + f(-x) is twice the bias.

    Where the gain can be read from the module (as it is, or with 1 added) and the answers are within a tenth of it, the
    module's counts: else a variance over d - 1 would pass for a gain. Whether it subtracts the mean is measured where
    `centred` is None.
    """
    centred = is_centred(case, built) if centred is None else centred
    return NormModel(centred, *case.apply(constants, case.caller(built), built.module, _spread(case, built), centred))


def constants(call: Callable[[Tensor], Tensor], module: object, x: Tensor, centred: bool) -> tuple[Tensor, ...]:
    """Return the gain, the bias and the epsilon of a norm; see `read_off`.

    Args:
        call: gives its answers.
        module: that it is, if it is one.
        x: one token `[1, 1, D]` at the scale LARGE.
        centred: whether it subtracts the mean.
    """
    up, down = (call(sign * x)[0, 0].detach().double() for sign in (1, -1))
    bias, half = (up + down) / 2, (up - down) / 2
    eps = torch.zeros((), dtype=torch.float64)
    for _ in range(2):  # an eps takes 1e-13 of the answers at this scale, which a gain that is read there has first
        gain = _readable_gain(module, half / normalised(x, centred, eps)[0, 0])
        eps = _eps(call, gain, x, centred)
    return _readable_gain(module, half / normalised(x, centred, eps)[0, 0]), bias, eps


def _eps(call: Callable[[Tensor], Tensor], gain: Tensor, x: Tensor, centred: bool) -> Tensor:
    """Return the epsilon that the answers at the small scale at which it weighs most nearly a half show; 0 if none."""
    best, eps = 2.0, torch.zeros((), dtype=torch.float64)
    for scale in _SMALL if x.dtype in (torch.float32, torch.float64) else ():
        small = (x * (scale / LARGE)).detach()
        odd = (call(small) - call(-small))[0, 0].detach().double() / 2
        ratio = (odd / (gain * normalised(small, centred, 0.0)[0, 0])).mean()
        if 0 < ratio < 1 - 100 * epsilon(x.dtype) and abs(float(ratio) - 0.7) < best:
            best = abs(float(ratio) - 0.7)
            centre = small.double() - small.double().mean() if centred else small.double()
            eps = centre.square().mean() * (ratio**-2 - 1)
    return eps


def _readable_gain(module: object, seen: Tensor) -> Tensor:
    if isinstance(module, nn.Module):
        for parameter in module.parameters():
            if parameter.shape == seen.shape:
                for candidate in (parameter.detach().double(), 1 + parameter.detach().double()):
                    if bool(((seen / candidate - 1).abs() < 0.1).all()):
                        return candidate
    return seen
