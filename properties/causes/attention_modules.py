"""What explains the output of an attention module that is not that of its projection matrices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.influence_maps import causal_region
from veriformer.properties.definitions.attention import multi_head_oracle
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.engine.case import Case


def module_cause(
    case: Case,
    built: Built,
    got: Tensor,
    x: Tensor,
    memory: Tensor,
    parts: dict[str, Tensor],
    scale: float,
    allow: Tensor | None,
) -> str | None:
    """Return the first explanation that gives `got`: another scale, one head, or a convention to declare.

    Args:
        case: of the violation.
        built: the module.
        got: `[B, T, D]`, what it gave.
        x: `[B, T, D]`.
        memory: `[B, S, D]`; `x` itself for self-attention.
        parts: its projections.
        scale: declared factor on q k^T.
        allow: `[T, S]` bool, or None.
    """
    config = case.config()
    d_head, d_model = parts["q"].shape[0] // config.num_heads, config.d_model
    limit = 4 * case.tolerance()

    def explains(of: dict[str, Tensor] = parts, **changed: object) -> bool:
        given = {"num_heads": config.num_heads, "scale": scale, "allow": allow, **changed}
        guess = multi_head_oracle(x, memory, of, **given).to(got.device)  # type: ignore[arg-type]
        return worst_difference(got, guess, size_of(guess)).error <= limit

    for number, words in (
        (d_head**-0.5, "1/sqrt(d_head)"),
        (d_model**-0.5, "1/sqrt(d_model)"),
        (1.0, "1 (no scaling)"),
        (d_head**0.5, "sqrt(d_head)"),
        (1 / d_head, "1/d_head (scaled twice, or muP)"),
    ):
        if abs(number - scale) > 1e-9 * scale and explains(scale=number):
            told = f"the output equals attention with scale {words} = {number:.6g} instead of {scale:.6g}"
            return f"{told} (declare attention_scale if that is meant)"
    if config.num_heads > 1 and parts["k"].shape == parts["q"].shape and explains(num_heads=1, scale=scale):
        return "the output equals attention with one head"
    region = allow if x is memory else None
    if region is not None and (shape := _parts_of_queries(explains, region) or _window(explains, region)):
        return shape
    for name, whose in (("q_bias", "queries"), ("k_bias", "keys"), ("v_bias", "values")):
        for factor, words in ((1 / scale, "is not scaled with them"), (scale, "is scaled twice"), (0.0, "is left out")):
            if name in parts and bool(parts[name].any()) and explains({**parts, name: factor * parts[name]}):
                if name != "q_bias" and factor == 1 / scale:
                    words = f"is {factor:.4g} times too large"
                return f"the bias of the {whose} {words}: with {factor:.4g} times that bias all is that of attention"
    return _convention(case, built, got, x, memory)


_SINKS = 4
"""So many keys of the beginning are known to be kept beside a window."""

_OTHERS = {
    "k_bias": "the keys' bias", "q_bias": "the queries' bias", "k": "the keys' weights", "q": "the queries' weights",
}  # fmt: skip


def _window(explains: Callable[..., bool], allow: Tensor) -> str | None:
    """Say that a causal attention sees a window, with or without the first keys beside it, where none is declared."""
    length = len(allow)
    for sinks in range(_SINKS + 1):
        for window in range(1, length - sinks):
            region = causal_region(length, window, None, sinks)
            if not torch.equal(region, allow.cpu()) and explains(allow=region):
                beside = f" and the first {sinks} keys" if sinks else ""
                more = f" and declare sink_tokens={sinks}" if sinks else ""
                return f"a query sees {window} keys up to its own{beside}: if by design declare window={window}{more}"
    return None


def _parts_of_queries(explains: Callable[..., bool], allow: Tensor) -> str | None:
    """Say that queries are taken in parts, and each part gets the rows of a causal mask that begin at the first key."""
    length = allow.shape[-1]
    for size in range(1, length):
        rows = torch.arange(length, device=allow.device) % size
        if explains(allow=allow & (torch.arange(length, device=allow.device)[None] <= rows[:, None])):
            return (
                f"queries are taken in parts of {size}, and the mask of each begins at key 0: query i of a part sees "
                "keys 0 to i, not those up to its own place (a diagonal that does not move with the part)"
            )
    return None


def _convention(case: Case, built: Built, got: Tensor, x: Tensor, memory: Tensor) -> str | None:
    """Tell normalised queries and sinks by what becomes of a copy whose projections are changed."""
    inputs = (x,) if memory is x else (x, memory)

    def changed(change: Callable[[dict[str, Tensor]], None]) -> Tensor:
        twin = copy.deepcopy(built)
        with torch.no_grad():
            change(case.bench.call(case.subject.projections, twin.module))
            return case.call(twin, *inputs).detach()

    def doubled(parts: dict[str, Tensor]) -> None:
        parts["q"].mul_(2)
        if "q_bias" in parts:
            parts["q_bias"].mul_(2)

    if worst_difference(changed(doubled), got, size_of(got)).error <= 4 * case.tolerance():
        return "queries twice as large change nothing: they are normalised (declare query_key_norm if that is meant)"

    def constant(parts: dict[str, Tensor]) -> None:
        parts["v"].zero_()
        parts["v_bias"].fill_(1)
        parts["o"].copy_(torch.eye(len(parts["o"]), parts["o"].shape[1]).to(parts["o"]))
        parts["o_bias"].zero_()

    def without(parts: dict[str, Tensor], other: str = "") -> None:
        for name in ("v", "v_bias", "o_bias", other):
            if name in parts:
                parts[name].zero_()

    rest = changed(without)
    if rest.shape == x.shape and worst_difference(rest, x, size_of(x)).error <= case.tolerance():
        return "with the value projection set to zero the input comes out: the module adds its input to its output"
    if bool((rest.abs() > case.tolerance() * size_of(got)).any()):
        for name, words in _OTHERS.items():
            alone = changed(partial(without, other=name))
            if not bool((alone.abs() > case.tolerance() * size_of(got)).any()):
                own = "bias" if "bias" in name else "weights"
                return f"what is projected as values takes {words}, not the values' own {own}"
        return (
            "with the value projection set to zero an output remains: values are taken from other rows than its own "
            "(is a fused projection cut in another order?)"
        )
    parts = case.bench.call(case.subject.projections, built.module)
    if "v_bias" in parts and "o_bias" in parts:
        sums = changed(constant)
        if float(sums.max() - sums.min()) < 1e-3 and abs(float(sums.mean()) - 1) > 1e-3:
            return f"all weights of a row sum to {float(sums.mean()):.4g}: a factor is applied after the softmax"
        if bool((sums < 1 - 1e-3).all()) and bool((sums > 0).all()):
            return "all weights of a row sum to less than one: a sink (declare sink=True if that is meant)"
    return None
