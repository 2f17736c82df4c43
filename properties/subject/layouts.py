"""The same values elsewhere in memory.

This file imports torch alone: its source is pasted into standalone scripts.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("strided", "transposed", "expanded")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return the values of `x` in another layout; as it is, if it has fewer than two axes.

    Args:
        x: any tensor.
        layout: "strided": every second entry of a wider tensor; "transposed": the first two axes lie the other way
            round; "expanded": the first sample stands for all of them, without a copy.
    """
    if x.ndim < 2:
        return x
    if layout == "expanded":
        return x[:1].expand(len(x), *[-1] * (x.ndim - 1))
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    return wide[..., ::2]
