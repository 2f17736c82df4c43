"""Attention and its gradients in closed form, in float64 and all heads at once, with what rounding may do to each."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.definitions.rounding import epsilon, rounding_bound


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
    weights = (q * scale) @ k.mT
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
    d_query, d_key = d_scores @ k * scale, d_scores.mT @ (q * scale)
    relative = relative + rounding_bound(dtype, v.shape[-1], operations=2) + rounding_bound(dtype, q.shape[-2])
    wide = w.norm(dim=-1, keepdim=True) * relative  # [B, H, T, 1]
    sides = v.norm(dim=-1, keepdim=True)  # [B, H, S, 1]
    seen = weights @ sides
    of_query = 2 * wide * seen * k.abs().amax(-2, keepdim=True) * scale
    columns = weights.mT @ torch.cat([wide, wide * seen, relative], -1)  # sums over T
    of_key = (columns[..., :1] * sides + columns[..., 1:2]) * q.abs().amax(-2, keepdim=True) * scale
    of_value = columns[..., 2:] * w.abs().amax(-2, keepdim=True)
    pairs = [(d_query, of_query), (d_key, of_key), (d_value, of_value)]
    if repeats > 1:
        summed = [tuple(x.unflatten(1, (-1, repeats)).sum(2) for x in pair) for pair in pairs[1:]]
        pairs = [pairs[0], *summed]
    floor *= float(w.abs().sum())
    return (*found, *(x for exact, bound in pairs for x in (exact, 2 * bound + floor)))
