"""Softmax block by block: which slip in rescaling, summing or merging its blocks gives the weights that were found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_LARGEST = 256
_LITTLE = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 8 * math.log(2), 6.0, 8.0, 10.0, 12.0, 16.0)
"""By how much a maximum may be raised before what was summed is rescaled, in kernels that spare that."""

_SUMS, _OUTPUTS = "the sum of the exponentials", "the sum of the weighed values"
_BOTH = "either sum, of the exponentials and of the weighed values,"


@dataclass(frozen=True)
class _Blocks:
    """The blocks of rows `[R, S]`, each figure `[R, N]`.

    `own`: largest score of a block; `running`: of it and those before; `mass`: sum of its exponentials, below the
    row's maximum; `at`: of which block each score is, `[S]`.
    """

    own: Tensor
    running: Tensor
    mass: Tensor
    at: Tensor

    @property
    def below(self) -> Tensor:
        """By how much the running maximum is less than that of the row."""
        return self.running[:, -1:] - self.running

    @property
    def rise(self) -> Tensor:
        """By how much each block raises the maximum; of the first that is seen 0."""
        before = torch.cat([self.running[:, :1], self.running[:, :-1]], dim=1)
        return torch.where(before.isinf(), torch.zeros_like(before), self.running - before)

    @property
    def sums(self) -> Tensor:
        """Logarithm of the sum of the exponentials of each block."""
        return self.mass.log() + self.running[:, -1:]


def streamed_cause(scores: Tensor, weights: Tensor, slack: float) -> str | None:
    """Name the slip of a softmax that is taken in blocks of keys, where weights are those of it and of no right one.

    Args:
        scores: `[R, S]` in float64, -inf where hidden.
        weights: `[R, S]` in float64, that were found for them.
        slack: largest difference of a weight from the right one that is rounding, relative to it.
    """
    found = sorted(streamed_slips(scores, weights, slack), key=lambda slip: "last block" in slip[1])  # what is rarer
    return f"blocks of {found[0][0]} keys: {found[0][1]}" if found else None


def streamed_slips(scores: Tensor, weights: Tensor, slack: float) -> list[tuple[int, str]]:
    """Return the sizes of blocks and the slips, in words, that give just these weights; nothing where they are right.

    Args:
        scores: as of `streamed_cause`.
        weights: likewise.
        slack: likewise.
    """
    rows = (~scores.isinf()).any(-1)
    scores, weights = scores[rows], weights[rows]
    right = scores.softmax(-1)
    if not len(scores) or _fits(weights, right, slack):
        return []
    return [
        (size, words)
        for size in range(1, min(_LARGEST, scores.shape[-1] - 1) + 1)
        for words, wrong in _wrong(_parted(scores, size), right)
        if _fits(weights, wrong, slack) and not _fits(wrong, right, 100 * slack)
    ]


def _fits(weights: Tensor, wanted: Tensor, slack: float) -> bool:
    said = wanted.isfinite().all(-1)
    if 2 * int(said.sum()) < len(said):
        return False
    return bool(((weights - wanted).abs() <= slack * wanted.abs() + 1e-12)[said].all())


def _parted(scores: Tensor, size: int) -> _Blocks:
    at = torch.arange(scores.shape[-1], device=scores.device) // size
    pad = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % size), value=-torch.inf).unflatten(-1, (-1, size))
    mass = (pad - scores.amax(-1)[:, None, None]).exp().sum(-1)
    return _Blocks(pad.amax(-1), pad.amax(-1).cummax(-1).values, mass, at)


def _wrong(blocks: _Blocks, right: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the slips, each with the weights that it gives: a factor of each block in what is divided, and by what."""
    one = torch.ones_like(blocks.mass)
    for words, factor in _rescalings(blocks):
        yield f"{_SUMS} {words}", _made(blocks, right, one, factor)
        yield f"{_OUTPUTS} {words}", _made(blocks, right, factor, one)
        yield f"{_BOTH} {words}", _made(blocks, right, factor, factor)
    for words, factor in _left_out(blocks):
        yield f"{_SUMS} {words}", _made(blocks, right, one, factor)
    empty = (blocks.mass == 0).sum(-1, keepdim=True) * (-blocks.running[:, -1:]).exp()
    whole = blocks.mass.sum(-1, keepdim=True)
    yield (
        "one of which nothing is visible counts as a key of score 0 without a value: the logarithm of its sum is 0 "
        "where it is -inf",
        right * whole / (whole + empty),
    )
    for words, factor in _merged(blocks):
        yield f"merged {words}", _made(blocks, right, factor, factor)


def _made(blocks: _Blocks, right: Tensor, above: Tensor, below: Tensor) -> Tensor:
    seen = blocks.mass > 0
    above, below = (torch.where(seen, f, torch.zeros_like(f)) for f in (above, below))
    whole = blocks.mass.sum(-1, keepdim=True)
    return right * above[:, blocks.at] * whole / (below * blocks.mass).sum(-1, keepdim=True)


def _rescalings(blocks: _Blocks) -> Iterator[tuple[str, Tensor]]:
    below = blocks.below
    yield "is not rescaled where a block raises the maximum", below.exp()
    yield (
        "is rescaled to a new maximum only after the new block was added to it, which is of that maximum already and "
        "is scaled down with the rest",
        (-blocks.rise).exp(),
    )
    if blocks.own.shape[1] > 1:
        until = torch.cat([below[:, :-1] - below[:, -2:-1], below[:, -1:]], dim=1)
        yield "is not rescaled where the last block, which may not be full, raises the maximum", (below - until).exp()
    for limit in _LITTLE:
        little = torch.where(blocks.rise <= limit, blocks.rise, torch.zeros_like(blocks.rise))
        if bool((little > 0).any()) and bool((blocks.rise > limit).any()):
            skipped = little.flip(-1).cumsum(-1).flip(-1) - little  # of all blocks behind one
            yield (
                f"is not rescaled where a block raises the maximum by little (by {float(little.max()):.3g} or less), "
                "and that block stands below the new maximum all the same: one that stays until it is raised by more "
                "must hold for both",
                skipped.exp(),
            )
    yield "is rescaled by exp(new - old) for exp(old - new) where a block raises the maximum", (2 * below).exp()
    yield "adds blocks that are each below a maximum of their own", (blocks.running[:, -1:] - blocks.own).exp()
    yield "is rescaled by 2^(old - new) for exp(old - new)", ((1 - math.log(2)) * below).exp()
    yield "is rescaled by exp(log2(e) (old - new)) for exp(old - new)", ((1 - 1 / math.log(2)) * below).exp()
    yield "is rescaled by the square root of exp(old - new)", (0.5 * below).exp()
    yield "is rescaled twice where a block raises the maximum", (-below).exp()


def _left_out(blocks: _Blocks) -> Iterator[tuple[str, Tensor]]:
    count = blocks.mass.shape[1]
    first = torch.zeros_like(blocks.mass)
    first[:, 0] = 1
    last = first.flip(-1)
    yield "is that of the last block alone: it is set anew by each block, not added to", last
    yield "is that of the first block alone", first
    if count > 2:
        yield "leaves the last block out", 1 - last
        yield "leaves the first block out", 1 - first
    yield "counts the last block twice", 1 + last
    yield "counts the first block twice", 1 + first


def _merged(blocks: _Blocks) -> Iterator[tuple[str, Tensor]]:
    def of(share: Tensor) -> Tensor:
        share = torch.where(blocks.mass > 0, share, torch.full_like(share, -torch.inf))
        return share.softmax(-1) / blocks.mass  # the share of a block for its mass

    sums = blocks.sums
    yield "with equal shares, whatever their log-sum-exps", of(torch.zeros_like(sums))
    yield "by the exponentials of their maxima alone, not of their log-sum-exps", of(blocks.own)
    yield "by exp of log-sum-exps that are in base 2, where exp2 belongs to them", of(sums / math.log(2))
    yield "by exp2 of log-sum-exps that are natural, where exp belongs to them", of(sums * math.log(2))
    yield "by their log-sum-exps themselves, without exp", of(sums.clamp(min=1e-9).log())
