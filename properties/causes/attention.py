"""Wrong formulas of attention that have been seen in released code, and which of them explains an output."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from veriformer.properties.definitions.attention import attention_bound, attention_oracle
from veriformer.properties.definitions.differences import worst_difference


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    return query.double() @ key.double().transpose(-2, -1) * scale


def _masked(scores: Tensor, allow: Tensor | None) -> Tensor:
    return scores if allow is None else scores.masked_fill(~allow, -torch.inf)


def _candidates(
    q: Tensor, k: Tensor, v: Tensor, scale: float, allow: Tensor | None
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    d_head, heads = q.shape[-1], q.shape[1]
    d_model = d_head * heads
    value = v.double()
    for number, words in (
        (d_head**-0.5, "1/sqrt(d_head)"),
        (d_model**-0.5, "1/sqrt(d_model)"),
        (1.0, "1 (no scaling)"),
        (d_head**0.5, "sqrt(d_head)"),
        (1 / d_head, "1/d_head (scaled twice, or muP)"),
        (1 / d_model, "1/d_model"),
        (d_head**-0.25, "d_head^-1/4 (one of two factors missing)"),
        (-scale, "the negative of the declared one"),
    ):
        if abs(number - scale) > 1e-9 * scale:
            yield (
                f"the output equals attention with scale {words} = {number:.6g} instead of {scale:.6g}",
                lambda number=number: attention_oracle(q, k, v, scale=number, allow=allow).to(q.device),  # type: ignore[misc]
            )
    scores = _scores(q, k, scale)
    yield from _conventions(scores, value, allow)
    yield (
        "the output equals attention with the softmax over the queries instead of the keys",
        lambda: _masked(scores, allow).softmax(dim=-2).nan_to_num(0.0) @ value,
    )
    if heads > 1:
        yield (
            "the output equals attention with the softmax over the heads instead of the keys",
            lambda: _masked(scores, allow).softmax(dim=1).nan_to_num(0.0) @ value,
        )
        yield (
            "the output equals attention with one softmax over heads and keys together",
            lambda: (
                _masked(scores, allow)
                .transpose(1, 2)
                .flatten(2)
                .softmax(-1)
                .unflatten(2, scores.shape[1::2])
                .transpose(1, 2)
                @ value
            ),
        )
    yield (
        "the output equals attention with the scale applied after the softmax",
        lambda: _masked(scores / scale, allow).softmax(-1) * scale @ value,
    )
    if allow is None:
        return
    full = allow.expand(scores.shape)
    yield "the output equals attention without the mask", lambda: scores.softmax(-1) @ value
    yield (
        "the output equals attention with the mask inverted",
        lambda: _masked(scores, ~full).softmax(-1).nan_to_num(0.0) @ value,
    )
    yield (
        "the output equals attention with the mask applied after the softmax, without renormalising",
        lambda: (scores.softmax(-1) * full) @ value,
    )
    yield (
        "the output equals attention with masked scores set to 0 instead of -inf",
        lambda: (scores * full).softmax(-1) @ value,
    )
    yield (
        "the output equals attention with the mask added to the scores as 0 and 1",
        lambda: (scores + full.double()).softmax(-1) @ value,
    )
    queries, keys = scores.shape[-2:]
    if queries != keys and bool((full == torch.ones_like(full).tril(keys - queries)).all()):
        top_left = torch.ones_like(full).tril(0)
        yield (
            "the output equals causal attention aligned to the top left: the last query does not see the last keys",
            lambda: _masked(scores, top_left).softmax(-1).nan_to_num(0.0) @ value,
        )

    for step in (1, -1):
        shifted = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries + step)
        if bool((full == torch.ones_like(full).tril(keys - queries)).all()):
            words = "lets one future key through" if step == 1 else "hides a query's own key too"
            yield (
                f"the output equals causal attention whose diagonal is off by one: it {words}",
                lambda shifted=shifted: _masked(scores, shifted).softmax(-1).nan_to_num(0.0) @ value,  # type: ignore[misc]
            )


def _conventions(scores: Tensor, value: Tensor, allow: Tensor | None) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield what is no defect where it is meant, and has to be declared."""
    shown = _masked(scores, allow)
    zero = torch.zeros_like(scores[..., :1])
    yield (
        "the output equals attention with a sink, one more key of score 0: declare sink=True if that is meant",
        lambda: torch.cat([shown, zero], dim=-1).softmax(-1)[..., :-1] @ value,
    )
    for cap in (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 50.0):
        yield (
            f"the output equals attention whose scores are capped: declare soft_cap={cap:g} if that is meant",
            lambda cap=cap: _masked(cap * torch.tanh(scores / cap), allow).softmax(-1).nan_to_num(0.0) @ value,  # type: ignore[misc]
        )
        yield (
            f"the output equals attention with a sink whose scores are capped: declare sink=True and soft_cap={cap:g}",
            lambda cap=cap: (
                torch.cat([_masked(cap * torch.tanh(scores / cap), allow), zero], -1).softmax(-1)[..., :-1] @ value  # type: ignore[misc]
            ),
        )


def attention_cause(
    got: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, allow: Tensor | None = None
) -> str | None:
    """Return the sentence of the wrong formula that gives `got` up to rounding, or None.

    Args:
        got: `[B, H, T, E]`, what the subject gave.
        query: `[B, H, T, K]`.
        key: `[B, G, S, K]`.
        value: `[B, G, S, E]`.
        scale: declared factor on q k^T.
        allow: bool, broadcastable to `[B, H, T, S]`.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        tiled = [x.repeat(1, groups, 1, 1) for x in (key, value)]
        guess = attention_oracle(query, tiled[0], tiled[1], scale=scale, allow=allow).to(got.device)
        if worst_difference(got, guess, attention_bound(query, key, value, scale)).error <= 2:
            return "the output equals attention with key-value heads tiled instead of repeated one after another"
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    found = []
    # what no query may see does not enter the right output, however loud it is: nor may it widen what counts as equal
    seen = None if allow is None else allow.expand(*got.shape[:3], -1).any(2)[..., None].to(got.device)
    sums = (key, value) if seen is None else (key.masked_fill(~seen, 0.0), value.masked_fill(~seen, 0.0))
    for words, formula in _candidates(query, key, value, scale, allow):
        # a wrong scale may exceed the declared one, and so may its rounding: the bound follows the larger score
        largest = query.shape[-1] ** 0.5 if "sqrt(d_head) =" in words else max(scale, 1.0)
        guess = formula()
        if guess.shape == got.shape:
            error = worst_difference(got, guess, 2 * attention_bound(query, *sums, largest)).error
            found += [words] if error <= 1 else []
    told = "; or ".join(found[:3])
    return f"{told} (declare attention_scale if that is meant)" if "with scale" in told else told or None
