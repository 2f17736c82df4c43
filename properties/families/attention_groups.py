"""Grouped queries: heads that share keys and values equal heads with these repeated."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.causes.attention import attention_cause
from veriformer.properties.engine.attending import Attending
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, sees_every_key
from veriformer.properties.engine.property import holds


@holds(
    "attention.grouped-queries",
    statement="Grouped queries equal full heads with each key-value head repeated for its group.",
    formula="A(q, k, v)_h uses k, v of head h // (H / G)",
    source="Ainslie et al. 2023, section 2.2.",
    kinds=("attention",),
    level="extended",
    unless=(
        sees_every_key,
        lambda s: None if s.fact("grouped_queries") else "the subject does not declare grouped_queries",
        excludes_fact("sink"),
    ),
    catches=("HD05", "HD07"),
)
def grouped_heads_are_repeated_in_blocks(case: Case) -> None:
    """1 < G < H, since one group or as many as heads hide tiling."""
    groups, repeats = case.choice("G", (2, 3)), case.choice("repeats", (2, 3))
    drawn = Attending(case, heads=groups * repeats)
    if drawn.heads != groups * repeats:  # its parameters are of another number
        groups = drawn.built.config.num_key_value_heads
        repeats = drawn.heads // groups
        if groups * repeats != drawn.heads or 1 in (groups, repeats):
            case.reject("one group, or as many as heads")
    key, value = drawn.key[:, :groups].contiguous(), drawn.value[:, :groups].contiguous()
    got = drawn(key=key, value=value)
    told = "grouped heads do not use the key-value head of their group"
    if case.subject.fact("query_key_norm"):
        whole = drawn(key=key.repeat_interleave(repeats, 1), value=value.repeat_interleave(repeats, 1))
        case.close(got, whole, told)
    else:
        case.close(
            got,
            drawn.oracle(key=key, value=value),
            told,
            bound=drawn.bound(key=key, value=value),
            cause=lambda: attention_cause(got, drawn.query, key, value, drawn.scale),
        )
    _gradients_are_summed(case, drawn, (drawn.query, key, value), repeats)
    case.witness()


def _gradients_are_summed(case: Case, drawn: Attending, given: tuple[Tensor, ...], repeats: int) -> None:
    """Require the gradients of grouped heads to be those of the heads repeated."""
    few = [x.detach().clone().requires_grad_() for x in given]
    many = [few[0].detach().clone(), *(x.detach().repeat_interleave(repeats, 1) for x in given[1:])]
    many = [x.requires_grad_() for x in many]
    outputs = [drawn(*few), drawn(*many)]
    weight = case.normal(*outputs[0].shape, dtype=outputs[0].dtype)
    if not all(output.requires_grad for output in outputs):
        return
    got = torch.autograd.grad((outputs[0] * weight).sum(), few)
    wanted = torch.autograd.grad((outputs[1] * weight).sum(), many)
    for name, mine, right in zip(("queries", "keys", "values"), got, wanted, strict=True):
        summed = right if name == "queries" else right.unflatten(1, (-1, repeats)).sum(2)
        told = f"the gradient of grouped {name} is not that of the heads repeated, summed over each group"
        case.close(mine, summed, told, constants_allowed=True)
