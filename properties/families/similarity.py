"""Similarities of two towers: both sides are normalised or neither, a temperature divides; part of `anatomy.scale`."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.flow import Flow
from veriformer.properties.anatomy.traced import Traced, storage_of
from veriformer.properties.engine.case import Case

_EVEN = 1e-3
"""Relative spread of lengths that are one number; that of float32 and of the eps of a norm is below 1e-5."""
_LOGS = r"(log_?\w*|logit_?scale|\w*log_?(scale|temp\w*|tau))"
_DIVIDES = r"(\w+_)?(temperature|temp|tau)"


@dataclass(frozen=True)
class Similarity:
    """Scores of samples with samples of another side.

    Attributes:
        scores: `[N, M]` as the product gave them.
        cosines: of the same two sides.
        spreads: of the lengths of the vectors of either side, relative to their mean.
    """

    scores: Tensor
    cosines: Tensor
    spreads: tuple[float, float]

    @property
    def is_lopsided(self) -> bool:
        """Whether the vectors of one side have one length, and those of the other have several."""
        return (min(self.spreads) < _EVEN) != (max(self.spreads) < _EVEN)


def similarities_are_even(case: Case, flowing: Flow) -> None:
    """Require both sides of what compares samples to be normalised where one is, and a temperature to divide."""
    output = flowing.seen.output
    shape = tuple(output.shape) if output is not None else ()
    if case.subject.kind != "classifier" or case.subject.fact("structure") == "other":
        return
    if similarity(flowing.module, flowing.seen, shape) is None:
        return
    case.require(
        case.apply(lopsided, flowing.module, flowing.seen, shape) == 0,
        "of what is compared the vectors of one side are normalised and those of the other are not",
        got="vectors of several lengths on one side, of one length on the other",
        expected="unit vectors on both sides, or on neither",
        asks=("structure", "other"),
        cause=lambda: "the features of one side are not divided each by its own norm",
    )
    told: list[str] = case.apply(odd_temperatures, flowing.module, flowing.seen, shape)
    case.equal(
        told, [], told[0] if told else "a temperature multiplies", got="; ".join(told), expected="none",
        asks=("structure", "other"), cause=lambda: told[0],
    )  # fmt: skip


def similarity(module: nn.Module, seen: Traced, shape: tuple[int, ...]) -> Similarity | None:
    """Return the last product that compares as many samples as the output `[N, M]`, or `[M, N]`, has; or None.

    What a parameter is multiplied with is projected, not compared.
    """
    if len(shape) != 2:
        return None
    own = {storage_of(p) for p in module.parameters()}
    for product in reversed(seen.products):
        sides = (product.left, product.right, product.output)
        if any((side.ndim == 3 and len(side) > 1) or storage_of(side) in own for side in sides):
            continue
        left, right, output = (side[0].double() if side.ndim == 3 else side.double() for side in sides)
        right = right.mT
        if tuple(output.shape) not in (shape, shape[::-1]):
            continue
        if left.shape[-1] != right.shape[-1] or min(left.shape[-1], len(left), len(right)) < 2:
            continue
        lengths = left.norm(dim=-1), right.norm(dim=-1)
        if not all(bool((one > 0).all()) for one in lengths):
            continue
        cosines = (left / lengths[0][:, None]) @ (right / lengths[1][:, None]).mT
        spreads = [float((one / one.mean() - 1).abs().max()) for one in lengths]
        return Similarity(output, cosines, (spreads[0], spreads[1]))
    return None


def lopsided(module: nn.Module, seen: Traced, shape: tuple[int, ...]) -> Tensor:
    """Return whether one side alone of what is compared is normalised."""
    found = similarity(module, seen, shape)
    return torch.tensor(int(found is not None and found.is_lopsided))


def odd_temperatures(module: nn.Module, seen: Traced, shape: tuple[int, ...]) -> list[str]:
    """Return what is odd about the factor on cosines, where a parameter of one number is called a scale or temperature.

    By the convention of their names a `logit_scale` is a logarithm, and by a `temperature` scores are divided.
    """
    found = similarity(module, seen, shape)
    if found is None or max(found.spreads) >= _EVEN or seen.output is None:
        return []
    scores = seen.output.double()
    cosines = found.cosines if found.cosines.shape == scores.shape else found.cosines.mT
    centred, other = cosines - cosines.mean(), scores - scores.mean()  # a bias is no factor
    factor = float((centred * other).sum() / centred.square().sum().clamp(min=1e-300))
    told = []
    for path, parameter in module.named_parameters():
        name = path.rpartition(".")[2].lower()
        if parameter.numel() != 1:
            continue
        value = float(parameter.detach())
        is_plain = abs(factor - value) <= 1e-3 * abs(value)
        if is_plain and re.fullmatch(_LOGS, name) and abs(value - 1) > 0.1:
            told.append(f"cosines are multiplied by {name} as it is, which is a logarithm by its name")
        elif is_plain and re.fullmatch(_DIVIDES, name) and abs(abs(value) - 1) > 0.1:
            told.append(f"cosines are multiplied by {name}, not divided by it")
    return told
