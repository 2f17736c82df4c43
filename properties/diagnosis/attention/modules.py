"""What is wrong with a module of attention whose projections are declared: the weights that it really uses.

In a copy of the module the value projection of one key-value head is made to send the s-th input to the s-th unit
vector, and the output projection to pass heads on; what comes out is the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.attention import project
from veriformer.properties.diagnosis.attention.seen import seen
from veriformer.properties.diagnosis.attention.weights import Read, if_meant, weighed, whose
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation
from veriformer.properties.subject.facts import attention_scale

_UNREAD = ("window", "prefix", "query_key_norm", "sink", "soft_cap")
"""Declared facts with which scores are made otherwise than by two projections and a scale."""

_ELSEWHERE = (None, "none", "learned", "sinusoidal")
"""Positions that attention itself knows nothing of."""


def module_opinion(case: Case, problem: Violation) -> str | None:
    """Say under which condition the weights of a module are wrong, and what they are there."""
    if case.subject.projections is None or any(case.subject.fact(name) for name in _UNREAD):
        return None
    if case.subject.fact("positions") not in _ELSEWHERE:
        return None
    key = ("diagnosis of the module",)
    if key not in case.bench.measured:
        case.bench.measured[key] = _measured(case)
    told: str | None = case.bench.measured[key]
    return told


def _measured(case: Case) -> str | None:
    config = max(case.bench.configs, key=lambda c: (min(c.num_heads, 2), c.d_head, -c.d_model))
    try:
        built = case.bench.pool.get(config, torch.float64)
    except SubjectError:
        return None
    for where, x, memory, mask in _ladder(case, built):
        read = _read(case, built, x, memory, mask)
        if read is None:
            return None
        if not read.is_right():
            told = whose(read) or seen(read) or weighed(read)
            if told and not where:
                return told + if_meant(case, told)
            return f"{where}: {told}" if told else None
    return None


def _ladder(case: Case, built: Built) -> Iterator[tuple[str, Tensor, Tensor, Tensor | None]]:
    """Yield a condition, `x` `[1, T, D]`, memory `[1, S, D]` (`x` itself for self-attention), and a mask `[1, S]`."""
    generator = torch.Generator().manual_seed(5)
    length = min(built.config.d_head, 6)

    def drawn(positions: int) -> Tensor:
        shape = (1, positions, built.config.d_model)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.bench.device)

    x = drawn(length)
    is_cross = case.subject.kind == "cross_attention"
    memory = drawn(length) if is_cross else x
    yield "", x, memory, None
    if is_cross:
        longer = drawn(length + 2)
        yield "where there are more queries than keys", longer, memory, None
    if case.subject.takes_mask("padding"):
        mask = torch.ones(1, length, dtype=torch.bool, device=x.device)
        mask[:, length - max(1, length // 3) :] = False
        yield "where a mask is given", x, memory, mask
        several = torch.cat([x, drawn(length)])
        memories = torch.cat([memory, drawn(length)]) if is_cross else several
        masks = torch.cat([mask, torch.ones_like(mask)])
        masks[1, 1:] = False
        yield "where samples have masks of their own", several, memories, masks


def _read(case: Case, built: Built, x: Tensor, memory: Tensor, mask: Tensor | None) -> Read | None:
    assert case.subject.projections is not None
    parts = case.bench.call(case.subject.projections, built.module)
    config, inputs = built.config, ((x,) if memory is x else (x, memory))
    d_head = parts["q"].shape[0] // config.num_heads
    groups, keys = parts["k"].shape[0] // d_head, memory.shape[1]
    if keys > d_head or parts["o"].shape[0] < parts["o"].shape[1] or parts["v"].shape[0] != groups * d_head:
        return None
    batch = len(x)

    def output(group: int | None, sample: int = 0) -> Tensor:
        twin = copy.deepcopy(built)
        with torch.no_grad():
            changed = case.bench.call(case.subject.projections, twin.module)
            for name in ("v", "v_bias", "o_bias"):
                if name in changed:
                    changed[name].zero_()
            changed["o"].copy_(torch.eye(*changed["o"].shape).to(changed["o"]))
            if group is not None:
                units = torch.zeros(d_head, memory.shape[-1], dtype=torch.float64)
                units[:keys] = torch.linalg.pinv(memory[sample].double().cpu()).T
                changed["v"][group * d_head : (group + 1) * d_head] = units.to(changed["v"])
            return case.call(twin, *inputs, **_given(case, mask)).detach().double().cpu()[sample]

    queries, width = x.shape[1], config.num_heads * d_head
    weights = torch.zeros(batch, config.num_heads, queries, batch, groups, keys, dtype=torch.float64)
    for b in range(batch):
        rest = output(None, b)
        for group in range(groups):
            found = (output(group, b) - rest)[:, :width].unflatten(-1, (config.num_heads, d_head))
            weights[b, :, :, b, group] = found.transpose(0, 1)[..., :keys]
            if bool((found[..., keys:].abs() > 1e-8).any()):
                return None
    if not _explains(case, built, parts, inputs, memory, mask, weights, groups):
        return None
    scale = attention_scale(case.subject.fact("attention_scale"), d_head, config.d_model)
    query, key = project(x, parts, "q", config.num_heads), project(memory, parts, "k", groups)
    cross = query @ key.repeat_interleave(config.num_heads // groups, 1).transpose(-2, -1)
    allow = torch.ones(cross.shape, dtype=torch.bool)
    if case.subject.fact("causal"):
        allow = allow.tril()
    if mask is not None:
        allow = allow & mask.cpu()[:, None, None]
        if memory is x:
            allow = allow & mask.cpu()[:, None, :, None]  # what a padded query gives is free
    given = None if mask is None else mask.cpu()[:, None, None].expand(allow.shape)
    return Read(
        weights, cross * scale, allow, cross, mask=given,
        is_causal=bool(case.subject.fact("causal")), scale=scale, width=d_head, values=d_head, slack=1e-8,
    )  # fmt: skip


def _explains(
    case: Case, built: Built, parts: dict[str, Tensor], inputs: tuple[Tensor, ...], memory: Tensor,
    mask: Tensor | None, weights: Tensor, groups: int,
) -> bool:  # fmt: skip
    """Return whether the module's own output is made of these weights, its values and its output projection."""
    value = project(memory, parts, "v", groups)
    heads = torch.einsum("bhtcgs,cgse->bhte", weights, value)
    wanted = heads.transpose(1, 2).flatten(2) @ parts["o"].detach().double().cpu().T
    if "o_bias" in parts:
        wanted = wanted + parts["o_bias"].detach().double().cpu()
    got = case.call(built, *inputs, **_given(case, mask)).detach().double().cpu()
    if got.shape != wanted.shape:
        return False
    close = (got - wanted).abs() < 1e-6 * (1 + wanted.abs())
    free = mask is not None and memory.shape == inputs[0].shape and len(inputs) == 1
    return bool(close[mask.cpu()].all() if free and mask is not None else close.all())


def _given(case: Case, mask: Tensor | None) -> dict[str, Any]:
    return {"memory_mask" if case.subject.kind == "cross_attention" else "attention_mask": mask}
