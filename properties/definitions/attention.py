"""Slow, looped float64 definitions that implementations are compared with, and bounds on what rounding may do."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from veriformer.properties.definitions.rounding import epsilon, rounding_bound


def softmax_oracle(scores: Tensor) -> Tensor:
    """Return softmax over the last axis in float64; a row of -inf throughout gives zeros.

    Args:
        scores: `[..., S]`.
    """
    wide = scores.detach().double()
    weights = (wide - _finite(wide.amax(dim=-1, keepdim=True))).exp()
    return weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


def underflow(dtype: torch.dtype) -> float:
    """Return the weight below which none counts: a step of subnormal numbers, or the fourth power of the precision.

    An exponential may be clamped where it is 1e-300: as many such weights as a row can have change no sum.
    """
    return max(float(torch.finfo(dtype).smallest_normal), epsilon(dtype) ** 4 if dtype.itemsize > 2 else 0.0)


def softmax_bound(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound the error of a softmax computed in `dtype`, entry by entry, `[..., S]` float64.

    The argument x - max carries an error of |x - max| u, so exp errs by as much relatively; the sum of S terms and the
    division add a reduction (in float32 at least: sums in half precision are what softmax.accuracy is to find), the
    result is rounded once more. What underflows may err by `underflow`.
    """
    exact = softmax_oracle(scores)
    wide = scores.detach().double()
    depth = (wide - wide.amax(dim=-1, keepdim=True)).abs().nan_to_num(0.0, 0.0, 0.0)
    summing = torch.float64 if dtype == torch.float64 else torch.float32
    relative = (depth + 4) * epsilon(dtype) + 2 * rounding_bound(summing, scores.shape[-1])
    return exact * relative + underflow(dtype)


def log_sum_exp_bound(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound the error of exp(x - log sum exp x), as right a softmax as the other, `[..., S]` float64.

    The logarithm l lies between max and max + log S. It is rounded, and so is x - l: |l| u and |x - l| u in the
    exponent (u = eps / 2), beside what `softmax_bound` counts, |x - max| eps among it. A rounded l stays in [max, max +
    log S], whose ends are rounded alike, so an exponent errs by at most log S and a weight by at most a factor S.
    """
    exact, width = softmax_oracle(scores), scores.shape[-1]
    wide = scores.detach().double()
    largest = wide.amax(dim=-1, keepdim=True).abs().nan_to_num(0.0, 0.0, 0.0)
    exponent = ((largest + 2 * math.log(width)) * epsilon(dtype)).clamp(max=math.log(width))
    return softmax_bound(scores, dtype) + exact * torch.expm1(exponent)


def long_row_bound(scores: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound the error of a softmax of rows of any length, computed by any formula, `[..., S]` float64.

    As `log_sum_exp_bound`, but for what the sum does: a sum of S terms, all positive, one after another errs by at most
    S u of itself (Higham 2002, 4.2), whatever the terms are, and a running one that is multiplied by exp(m - m')
    wherever a larger maximum m' is met by as much again at most: 2 S u = S eps, of float32 at least.

    Args:
        scores: `[..., S]`.
        exact: their softmax in float64.
        dtype: of the arithmetic.
    """
    wide = scores.detach().double()
    top = _finite(wide.amax(dim=-1, keepdim=True))
    depths, of_all = (top - wide).clamp(max=_NOTHING), _error_of_all(top, scores.shape[-1], dtype)
    return depths.mul(epsilon(dtype)).add(of_all).mul(exact) + underflow(dtype)


def softmax_of_long_rows(scores: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `softmax_oracle` and `long_row_bound` of the same rows, which share most of their work.

    Args:
        scores: `[..., S]`.
        dtype: of the arithmetic.
    """
    wide = scores.detach().double()
    top = _finite(wide.amax(dim=-1, keepdim=True))
    depths = (top - wide).clamp_(max=_NOTHING)
    exact = depths.neg().exp_()
    exact /= exact.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    of_all = _error_of_all(top, scores.shape[-1], dtype)
    return exact, depths.mul_(epsilon(dtype)).add_(of_all).mul_(exact).add_(underflow(dtype))  # in place: rows are long


_NOTHING = 1000.0
"""A depth below the maximum from which on exp is 0 in float64, and so is whatever it is multiplied with."""


def _finite(top: Tensor) -> Tensor:
    """Return the maxima of rows; 0 of a row of -inf throughout."""
    return top.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0)


def _error_of_all(top: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return by how much all weights of a row err relatively, whatever their depth, from its maximum `[..., 1]`."""
    summing = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = ((top.abs().nan_to_num(0.0, 0.0, 0.0) + 2 * math.log(width)) * epsilon(dtype)).clamp(max=math.log(width))
    return torch.expm1(exponent) + (4 * epsilon(dtype) + width * epsilon(summing))


def attention_oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    allow: Tensor | None = None,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Return attention by its definition, looped over samples and heads, in float64.

    Args:
        query: `[B, H, T, K]`.
        key: `[B, G, S, K]`; head h uses key-value head h // (H / G).
        value: `[B, G, S, E]`.
        scale: factor on q k^T.
        allow: bool, broadcastable to `[B, H, T, S]`; a row without a True gives zeros.
        bias: added to the scores, broadcastable likewise.
        soft_cap: c in c tanh(scores / c).

    Returns:
        `[B, H, T, E]` float64.

    Source: Vaswani et al. 2017, equation 1.
    """
    batch, heads, length = query.shape[:3]
    groups = heads // key.shape[1]
    shape = (batch, heads, length, key.shape[2])
    output = torch.zeros(batch, heads, length, value.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            q, k, v = (x.detach().double().cpu() for x in (query[b, h], key[b, h // groups], value[b, h // groups]))
            scores = q @ k.T * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if bias is not None:
                scores = scores + bias.detach().double().cpu().expand(shape)[b, h]
            if allow is not None:
                scores = scores.masked_fill(~allow.cpu().expand(shape)[b, h], -torch.inf)
            output[b, h] = softmax_oracle(scores) @ v
    return output


def attention_bound(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Bound the rounding error of attention in the dtype of its inputs, `[B, H, T, 1]`, float64.

    A score is a sum over K terms, wrong by at most gamma_K sum |q| |k| scale (and by a few u more in the fused
    exponentials of some kernels); an error of d in the scores moves weights by at most 2 d relatively; summing S
    weighted values and dividing adds three reductions over S. All times the largest value.
    """
    dtype = query.dtype
    groups = query.shape[1] // key.shape[1]
    wide_k, wide_v = (x.detach().double().repeat_interleave(groups, dim=1) for x in (key, value))
    products = query.detach().double().abs() @ wide_k.abs().transpose(-2, -1) * scale
    score_error = products.amax(dim=-1, keepdim=True) * (rounding_bound(dtype, key.shape[-1]) + 2 * epsilon(dtype))
    relative = 2 * score_error + rounding_bound(dtype, key.shape[-2], operations=3)
    return relative * wide_v.abs().amax(dim=(-2, -1), keepdim=True)


def stored_attention_bound(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Bound the rounding error of attention that sums in float32 and stores in the dtype of its inputs, `[B, H, T, 1]`.

    As tensor cores do, and every fused kernel. A score is rounded once (u |s|, which moves weights by twice that
    relatively), so are a weight, a value times it, and the output.
    """
    groups = query.shape[1] // key.shape[1]
    wide_k, wide_v = (x.detach().double().repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (query.detach().double() @ wide_k.transpose(-2, -1) * scale).abs().amax(dim=-1, keepdim=True)
    return epsilon(query.dtype) * (2 * scores + 4) * wide_v.abs().amax(dim=(-2, -1), keepdim=True)


def project(x: Tensor, parts: Mapping[str, Tensor], name: str, heads: int) -> Tensor:
    """Return `[B, heads, T, K]`: `x` `[B, T, D]` through projection `name` and split into heads, in float64."""
    wide = x.detach().double().cpu() @ parts[name].detach().double().cpu().T
    bias = parts.get(f"{name}_bias")
    if bias is not None:
        wide = wide + bias.detach().double().cpu()
    return wide.unflatten(-1, (heads, -1)).transpose(1, 2)


def multi_head_oracle(
    x: Tensor,
    memory: Tensor,
    parts: Mapping[str, Tensor],
    *,
    num_heads: int,
    scale: float,
    allow: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Return multi-head attention from its projection matrices, in float64.

    Args:
        x: `[B, T, D]`.
        memory: `[B, S, D]`; `x` itself for self-attention.
        parts: `q, k, v, o` `[out, in]`, and `q_bias` ... where there are biases.
        num_heads: H; the number of key-value heads follows from the shapes.
        scale: factor on q k^T.
        allow: bool, broadcastable to `[B, H, T, S]`.
        soft_cap: see `attention_oracle`.

    Returns:
        `[B, T, D]` float64.

    Source: Vaswani et al. 2017, section 3.2.2.
    """
    query = project(x, parts, "q", num_heads)
    groups = parts["k"].shape[0] // query.shape[-1]
    key, value = project(memory, parts, "k", groups), project(memory, parts, "v", groups)
    heads = attention_oracle(query, key, value, scale=scale, allow=allow, soft_cap=soft_cap)
    output = heads.transpose(1, 2).flatten(2) @ parts["o"].detach().double().cpu().T
    bias = parts.get("o_bias")
    return output if bias is None else output + bias.detach().double().cpu()
