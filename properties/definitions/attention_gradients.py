"""Attention and its gradients in closed form, in float64 and all heads at once, with what rounding may do to each.

In two readings: of a kernel that sums in the dtype of its inputs, and of one that stores in it and sums in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.definitions.rounding import epsilon, rounding_bound

_BLOCK = 16
"""Keys of the smallest block that a kernel works in."""


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    allow: Tensor | None = None,
    soft_cap: float | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the output and its bound; with `weight`, for queries, keys and values the gradient and its bound too.

    With P the weights and w the gradient of the output: dv = P^T w; dS = P (w v^T - <w, o>), times the derivative of a
    cap; dq = scale dS k; dk = scale dS^T q.

    A score errs by at most d = |q| max |k| scale (gamma_K + 2 eps), Cauchy-Schwarz: a weight by e^(2 d) - 1 relatively,
    and by five reductions over S (two sums, one division, and in tiles a rescaling of each sum). The gradients add a
    product over E and a sum over T or S; of a difference w v^T - <w, o> the sizes |w| |v| of both sides count.
    A kernel that joins the outputs of blocks as o + c (o' - o) gives 1 - c of its gradient to o, a difference that is
    off by eps / 2 however small it is: beside its relative error a weight errs by that at each joint behind it.

    Args:
        query: `[B, H, T, K]`.
        key: `[B, G, S, K]`; head h uses key-value head h // (H / G).
        value: `[B, G, S, E]`.
        scale: factor on q k^T.
        allow: bool, broadcastable to `[B, H, T, S]`; a row without a True gives zeros.
        soft_cap: c in c tanh(scores / c).
        weight: `[B, H, T, E]`, of the sum whose gradients are taken.

    Returns:
        Pairs of a float64 tensor on the CPU and a bound on twice the error of one evaluation, broadcastable to it.

    Source: Vaswani et al. 2017, equation 1; Dao et al. 2022, appendix B.2, equations 2 to 4.
    """
    dtype, repeats = query.dtype, query.shape[1] // key.shape[1]
    q, k, v = (x.detach().to("cpu", torch.float64) for x in (query, key, value))
    k, v = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k, v))
    scaled = q * scale
    weights = scaled @ k.mT
    slope = None
    if soft_cap is not None:
        weights = (weights / soft_cap).tanh_()
        slope = 1 - weights.square()
        weights = weights * soft_cap
    if allow is not None:
        weights = weights.masked_fill_(~allow.cpu(), -torch.inf)
    largest = weights.amax(-1, keepdim=True).nan_to_num_(neginf=0.0)
    weights = weights.sub_(largest).exp_()
    weights /= weights.sum(-1, keepdim=True).clamp_(min=torch.finfo(torch.float64).tiny)
    output = weights @ v
    sizes = k.norm(dim=-1).amax(-1)[..., None, None] * q.norm(dim=-1, keepdim=True) * abs(scale)
    score_error = sizes * (rounding_bound(dtype, k.shape[-1]) + 2 * epsilon(dtype))
    relative = torch.expm1(2 * score_error) + rounding_bound(dtype, k.shape[-2], operations=5)
    floor = float(torch.finfo(dtype).smallest_normal) * k.shape[-2]  # what underflows
    found = (output, 2 * relative * v.abs().amax((-2, -1), keepdim=True) + floor)
    if weight is None:
        return found
    w = weight.detach().to("cpu", torch.float64)
    d_value = weights.mT @ w
    d_scores = (w @ v.mT).sub_((w * output).sum(-1, keepdim=True)).mul_(weights)
    if slope is not None:
        d_scores *= slope
        relative = relative + 2 * score_error / min(soft_cap or 1.0, 1.0)  # |d (1 - tanh^2)| < 2 / c
    d_query, d_key = d_scores @ k * scale, d_scores.mT @ scaled
    relative = relative + rounding_bound(dtype, v.shape[-1], operations=2) + rounding_bound(dtype, q.shape[-2])
    wide = w.norm(dim=-1, keepdim=True) * relative  # [B, H, T, 1]
    sides = v.norm(dim=-1, keepdim=True)  # [B, H, S, 1]
    joints = epsilon(dtype) / 2 * (k.shape[-2] // _BLOCK)
    loose = weights.add_(joints / relative)
    seen = loose @ sides
    of_query = 2 * wide * seen * k.abs().amax(-2, keepdim=True) * scale
    columns = loose.mT @ torch.cat([wide, wide * seen, relative], -1)  # sums over T
    of_key = (columns[..., :1] * sides + columns[..., 1:2]) * q.abs().amax(-2, keepdim=True) * scale
    of_value = columns[..., 2:] * w.abs().amax(-2, keepdim=True)
    pairs = [(d_query, of_query), (d_key, of_key), (d_value, of_value)]
    if repeats > 1:
        summed = [tuple(x.unflatten(1, (-1, repeats)).sum(2) for x in pair) for pair in pairs[1:]]
        pairs = [pairs[0], *summed]
    floor *= float(w.abs().sum())
    return (*found, *(x for exact, bound in pairs for x in (exact, 2 * bound + floor)))


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
