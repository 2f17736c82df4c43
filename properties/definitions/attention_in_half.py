"""Attention of half-precision inputs and its gradients, with what a kernel may err that sums in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.definitions.rounding import epsilon, rounding_bound


def stored_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, weight: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return the output and the gradients of <weight, output> for queries, keys and values, each with a bound.

    Everything may be rounded to the dtype of the inputs wherever it is stored, u each: scaled queries and keys, scores
    (4 u of a = |q| |k|^T scale together), weights, a normaliser, the output; in the backward w v^T and what it is
    multiplied with. Sums run in float32. To first order, with w the weights and v - o the values around the output,

        |do| <= 4 u sum w a |v - o| + 4 u sum w |v|,

    the first sum by Cauchy-Schwarz below, beside a factor of the whole row: see `row_factor`. With x = w v^T - <w, o>
    of both roundings and a' = sum w a the gradient dS of a score errs by

        e = w ((4 u (a + a') + 4 u) |x| + 2 u |g| |v|^T + 4 u sum w a |x| + 3 u sum w |g| |v|^T) + u |dS|,

    and where the maximum of a row is not detached the errors of all its scores remain at it: dq errs by
    scale ((e + 2 u |dS|) |k| + sum e max |k|) + u |dq|, dk likewise, dv by sum w (4 u (a + a') + 4 u) |g| + u |dv|.
    A sum that is kept in the dtype itself errs by as much as u times the number of its terms.

    Args:
        query: `[B, H, T, K]` float16 or bfloat16.
        key: `[B, H, S, K]`.
        value: `[B, H, S, E]`.
        scale: factor on q k^T.
        weight: `[B, H, T, E]`, of the sum whose gradients are taken.

    Returns:
        Pairs of float64 tensors on the CPU.

    Source: Higham 2002, section 3.1; Dao et al. 2022, appendix B.2, equations 2 to 4.
    """
    unit, least = epsilon(query.dtype) / 2, float(torch.finfo(query.dtype).smallest_normal) * epsilon(query.dtype)
    q, k, v, g = (x.detach().to("cpu", torch.float64) for x in (query, key, value, weight))
    over_keys, over_queries = (rounding_bound(torch.float32, n, operations=3) for n in (key.shape[-2], query.shape[-2]))
    w = (q @ k.mT * scale).softmax(-1)
    wa = w * (q.abs() @ k.abs().mT * scale)  # weights times a
    output, sizes = w @ v, w @ v.abs()
    spread = (w @ v.square() - output.square()).clamp(min=0.0).sqrt()
    about = (wa.square() / w).sum(-1, keepdim=True).sqrt() * spread
    of_output = 4 * unit * about + (4 * unit + over_keys) * sizes + least * v.abs().sum(-2, keepdim=True)
    g_v = g @ v.mT
    x = g_v - (g * output).sum(-1, keepdim=True)
    both = g.abs() @ v.abs().mT
    moved = 4 * unit * (wa + w * wa.sum(-1, keepdim=True)) + 4 * unit * w  # what a weight errs by
    rows = 4 * unit * (wa * x.abs()).sum(-1, keepdim=True) + 3 * unit * (w * both).sum(-1, keepdim=True)
    d_s = (w * x).abs()
    e = moved * x.abs() + w * (2 * unit * both + rows) + 3 * unit * d_s + least * (1 + x.abs())
    d_query, d_key, d_value = (w * x) @ k * scale, (w * x).mT @ q * scale, w.mT @ g
    remains = e.sum(-1, keepdim=True)
    of_query = scale * ((e + over_keys * d_s) @ k.abs() + remains * k.abs().amax(-2, keepdim=True))
    of_key = scale * ((e + remains + over_queries * d_s).mT @ q.abs())
    of_value = (moved + over_queries * w + least).mT @ g.abs() + unit * d_value.abs()
    bounds = (of_output, of_query + unit * d_query.abs() + least, of_key + unit * d_key.abs() + least, of_value + least)
    return list(zip((output, d_query, d_key, d_value), bounds, strict=True))


def row_factor(got: Tensor, expected: Tensor) -> Tensor:
    """Return the factor c of each row `[B, H, T, 1]` that brings c times what was expected nearest to what was given.

    A kernel that stores the log-sum-exp of a row, as weights exp(s - log sum exp s) need it, is off by a factor of
    u |log sum exp s| there, and so is what it stores of the difference; that says nothing of its sums.
    """
    wide = got.detach().double()
    return (wide * expected).sum(-1, keepdim=True) / expected.square().sum(-1, keepdim=True)
