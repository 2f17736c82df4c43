"""Wrong derivatives of a soft cap, c tanh(s / c)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def wrong_cap_slopes(scores: Tensor, capped: Tensor, cap: float) -> Iterator[tuple[str, Tensor]]:
    """Yield factors with one thing wrong, in place of 1 - (capped / c)^2.

    Args:
        scores: before the cap.
        capped: after it.
        cap: the cap c.
    """
    right = 1 - (capped / cap).square()
    rule = f"the derivative of c tanh(s / c) with c = {cap:g} is 1 - tanh(s / c)^2 = 1 - (capped / c)^2"
    yield f"the soft cap is left out of the backward: {rule}", torch.ones_like(right)
    yield f"the backward takes 1 - capped^2: the capped score is not divided by c ({rule})", 1 - capped.square()
    yield f"the backward takes 1 - (s / c)^2 with the score before the cap ({rule})", 1 - (scores / cap).square()
    yield f"the backward takes 1 - s^2 with the score before the cap ({rule})", 1 - scores.square()
    yield f"the backward takes 1 - tanh(s)^2: the score is not divided by c ({rule})", 1 - scores.tanh().square()
    yield (
        f"the backward takes 1 - tanh(capped / c)^2: tanh is taken twice ({rule})",
        1 - (capped / cap).tanh().square(),
    )
    yield f"the backward takes 1 - tanh(capped)^2: tanh is taken twice ({rule})", 1 - capped.tanh().square()
    yield (
        f"the backward takes 1 - capped^2 / c: the square stands inside of the division ({rule})",
        1 - capped.square() / cap,
    )
    yield f"the backward takes 1 - s^2 / c with the score before the cap ({rule})", 1 - scores.square() / cap
    yield f"the backward takes (1 - capped / c)^2: the whole is squared ({rule})", (1 - capped / cap).square()
    yield f"the backward takes 1 - capped / c: it is not squared ({rule})", 1 - capped / cap
    yield f"the backward takes 1 + (capped / c)^2: the sign is wrong ({rule})", 1 + (capped / cap).square()
    yield f"the backward takes (capped / c)^2: it is not subtracted from 1 ({rule})", (capped / cap).square()
    yield f"the backward divides by c once more: a factor 1 / {cap:g} ({rule})", right / cap
    yield f"the backward multiplies by c: a factor {cap:g} ({rule})", right * cap
    yield f"the derivative of the soft cap is applied twice ({rule})", right.square()
