"""Mixing tokens without attention: a convolution, a long one, a non-local model (chapter 10, sections 1.2 to 1.4)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def convolution(x: Tensor, kernel: Tensor) -> Tensor:
    """Return h_i = sum over |o| <= k of W_o x_{i - o}, zeros outside.

    Args:
        x: `[T, D]`.
        kernel: W, `[2k + 1, D, D]`; `kernel[k + o]` belongs to the offset o.
    """
    reach = len(kernel) // 2
    padded = torch.nn.functional.pad(x, (0, 0, reach, reach))
    windows = padded.unfold(0, len(kernel), 1)  # [T, D, 2k + 1], the earliest first
    return torch.einsum("tdo,oed->te", windows.flip(-1), kernel)


def long_convolution(x: Tensor, weights: Callable[[Tensor], Tensor]) -> Tensor:
    """Return h_i = sum_j g(i - j) x_j.

    Args:
        x: `[T, D]`.
        weights: g, from offsets `[T, T]` to matrices `[T, T, D, D]`; it may be defined at any real offset.
    """
    places = torch.arange(len(x), dtype=x.dtype)
    return torch.einsum("ijed,jd->ie", weights(places[:, None] - places[None]), x)


def non_local(x: Tensor, weights: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return h_i = sum_j g(x_i, x_j) x_j.

    Args:
        x: `[T, D]`.
        weights: g, from a pair of tokens `[D]`, `[D]` to a matrix `[D, D]`.
    """
    return torch.stack([sum((weights(a, b) @ b for b in x), torch.zeros_like(a)) for a in x])


def kernel_attention(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return sum_j exp(q_i . k_j / sqrt(K)) v_j, attention without its denominator; `x` `[T, D]`, maps `[D, K]`."""
    scores = (x @ query) @ (x @ key).T / query.shape[1] ** 0.5
    return scores.exp() @ (x @ value)
