"""Which tokens a sampler keeps, read off the probabilities that it draws from: how many, and by which threshold."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 1e-12
"""A probability below is none."""


def one_threshold(logits: Tensor, got: Tensor, top_k: int) -> str | None:
    """Say by which one number a batch is cut, where it is one.

    Args:
        logits: of the last tokens, `[B, V]`.
        got: probabilities that are drawn from, `[B, V]`.
        top_k: tokens to be kept of each sample.
    """
    count = min(top_k, logits.shape[-1])
    each, flat = logits.topk(count, dim=-1).values[:, -1], logits.flatten()
    fits = []
    for words, at in (
        ("the least of their k-th largest logits", each.min()),
        ("the largest of their k-th largest logits", each.max()),
        ("the k-th largest logit of the first of them", each[0]),
        ("the k-th largest logit of the last of them", each[-1]),
        ("the mean of their k-th largest logits", each.mean()),
        ("the k-th largest logit of all samples together", flat.topk(count).values[-1]),
        ("the B k-th largest logit of all B samples together", flat.topk(count * len(logits)).values[-1]),
    ):
        reach = logits >= at
        reach |= ~reach.any(-1, keepdim=True)  # where none does all are masked, and so alike
        if torch.equal(got > 0, reach) and not torch.equal(got > 0, logits >= each[:, None]):
            fits.append(words)
    if not fits:
        return None
    told = " or, which is the same here, ".join(fits)
    return f"all are cut at {told}, one threshold for the batch instead of one a sample"


def cut_cause(logits: Tensor, got: Tensor, temperature: float, top_k: int | None) -> str | None:
    """Say which tokens are kept where it is not the k of the largest logits, or at which temperature they are weighed.

    Args:
        logits: of the last tokens, `[B, V]`.
        got: probabilities that are drawn from, `[B, V]`.
        temperature: that is asked for.
        top_k: tokens to be kept of each sample; None for all.
    """
    if got.shape != logits.shape:
        return None
    kept, width = got > _LEAST, logits.shape[-1]
    count = min(top_k or width, width)
    if not torch.equal(kept, _best(logits, count)):
        return _kept(logits, kept, temperature, count)
    tau = _temperature(logits, got, kept)
    if tau is None or abs(tau / temperature - 1) < 1e-2:
        return None
    slip = " (the temperature twice)" if abs(tau / temperature**2 - 1) < 1e-2 else ""
    return f"the right tokens are drawn from at temperature {tau:.4g} instead of {temperature:g}{slip}"


def _kept(logits: Tensor, kept: Tensor, temperature: float, count: int) -> str | None:
    width, divided = logits.shape[-1], logits / temperature
    best = logits >= logits.amax(-1, keepdim=True)
    before = logits.topk(count, dim=-1).values[:, -1:]
    after = before / temperature
    guesses: list[tuple[str, Tensor]] = []
    if count < width:
        if temperature != 1:
            guesses += [
                ("the threshold is the k-th largest logit before the division by the temperature, and is compared "
                 "with logits after it", divided >= before),
                ("the threshold is the k-th largest logit after the division by the temperature, and is compared "
                 "with logits before it", logits >= after),
            ]  # fmt: skip
        guesses += [
            ("no token is cut", torch.ones_like(kept)),
            ("those of ids 0 to k - 1 are kept, whatever their logits: what is chosen in sorted order is not brought "
             "back to the order of the ids", (torch.arange(width, device=kept.device) < count).expand_as(kept)),
            ("one token too many is kept: the best but for k is not cut", _best(logits, count + 1)),
            ("one token too few is kept: the k-th best is cut, too", _best(logits, count - 1)),
            ("the k smallest logits are kept, not the k largest", _best(-logits, count)),
            ("the k best are cut, and the others kept", ~_best(logits, count)),
        ]  # fmt: skip
    for words, guess in guesses:
        if torch.equal(kept, guess) or torch.equal(kept, guess | best):
            many = kept.sum(-1).tolist()
            return f"at temperature {temperature:g} with top_k = {count} it draws from {many} tokens: {words}"
    return None


def _best(logits: Tensor, count: int) -> Tensor:
    """Return which are the largest, so many of each row; none for 0."""
    if count < 1:
        return torch.zeros_like(logits, dtype=torch.bool)
    return logits >= logits.topk(min(count, logits.shape[-1]), dim=-1).values[:, -1:]


def _temperature(logits: Tensor, got: Tensor, kept: Tensor) -> float | None:
    """Return the one temperature at which the logits that are kept have these probabilities, if there is one."""
    found = []
    for row, p, is_kept in zip(logits, got, kept, strict=True):
        x, y = row[is_kept], p[is_kept].log()
        if len(x) < 2:
            continue
        x, y = x - x.mean(), y - y.mean()
        slope = float((x * y).sum() / (x * x).sum().clamp_min(1e-30))
        if slope <= 0 or float((y - slope * x).abs().max()) > 1e-3 * float(y.abs().max()):
            return None
        found.append(1 / slope)
    return found[0] if found and max(found) < 1.01 * min(found) else None
