"""What is said of wrong kernels: each sentence from a kernel that is wrong in that way, and nothing of right ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from veriformer.properties import Subject
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.diagnosis.kernels.kernels import kernel_opinion
from veriformer.properties.diagnosis.unsteady import unsteady_opinion
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RandomDraws
from veriformer.properties.engine.violations import Violation

Kernel = Callable[..., Tensor]


def kernel(fault: str = "") -> Kernel:
    """Return a kernel in blocks of four keys, with one fault."""

    def attend(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        batch, heads, queries, width = q.shape
        keys, each = k.shape[2], heads // k.shape[1]
        if fault == "in place" and not q.requires_grad:
            q.mul_(1.5)
            q = q / 1.5
        k = k.repeat_interleave(each, 1)
        v = v.repeat(1, each, 1, 1) if fault == "tiled values" else v.repeat_interleave(each, 1)
        scale = {"scaled twice": 1 / width, "unscaled": 1.0, "width of values": v.shape[-1] ** -0.5}.get(
            fault, width**-0.5
        )
        scores = q @ k.transpose(-2, -1) * scale
        allow = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
        if attention_mask is not None and not (fault == "mask forgotten with causal" and causal):
            mask = attention_mask.expand(batch, -1, -1, -1)
            if fault == "transposed" and queries == keys:
                mask = mask.transpose(-2, -1)
            if fault == "mask of another sample":
                mask = mask.flatten(0, 1).repeat(heads, 1, 1).unflatten(0, (batch, heads))
            allow = allow & (~mask if fault == "inverted" else mask)
        if causal and fault != "not causal":
            step = {"one ahead": 1, "own hidden": -1}.get(fault, 0)
            allow = allow & torch.ones(queries, keys).bool().tril(0 if fault == "top left" else keys - queries + step)
        if fault == "two blocks" and keys > 4:
            allow = allow & (torch.arange(keys) < 8)
        fill = {"hidden at -5": -5.0, "hidden at 0": 0.0}.get(fault, -math.inf)
        scores = torch.where(allow, scores, scores - 3 if fault == "lowered by 3" else fill)
        weights = scores.softmax(-2 if fault == "over queries" else -1).nan_to_num(0.0)
        if fault == "phantoms" and keys % 4:
            weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + 4 - keys % 4)
        if fault == "denominator" and keys > 4:
            first = scores.exp()[..., :4].sum(-1, keepdim=True)
            weights = weights / (1 + first)
        if fault == "merge" and keys > 4:
            weights = weights * torch.where(torch.arange(keys) < 4, 1.3, 0.8)
        if fault == "factor":
            weights = weights * 0.9
        if fault == "shifted values":
            v = v.roll(1, 2)
        if fault == "loud" and attention_mask is not None:
            loudest = (q @ k.transpose(-2, -1) * scale).amax(-1, keepdim=True)
            weights = torch.where(allow, (scores - loudest).exp(), 0.0)
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        if fault == "noise":
            weights = torch.nn.functional.dropout(weights, 0.3)
        return weights @ v

    return attend


def case_of(fault: str) -> Case:
    subject = Subject(kind="attention", build=lambda _: None, forward=_forward(fault), mask_forms=("pairwise",))
    return Case(Workbench(subject, Settings()), RandomDraws(0, {}))


def _forward(fault: str) -> Callable[..., Tensor]:
    attend = kernel(fault)

    def forward(
        model: None, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        return attend(q, k, v, attention_mask, causal)

    return forward


SAID = {
    "tiled values": (
        "where heads share keys and values",
        "[0, 1, 0, 1] instead of [0, 0, 1, 1]",
        "the keys are the right",
    ),
    "scaled twice": ("1/d_head (scaled twice)",),
    "unscaled": ("1 (no scaling)",),
    "width of values": ("where values are wider than keys", "1/sqrt(width of the values)"),
    "mask forgotten with causal": ("a mask and causal=True are given together", "the mask is forgotten"),
    "transposed": ("as many queries as keys", "the mask is transposed"),
    "mask of another sample": ("several samples", "tiled over heads"),
    "inverted": ("where a mask is given", "the mask is inverted"),
    "not causal": ("with causal=True", "the causal mask is not applied"),
    "one ahead": ("with causal=True", "sees one key ahead"),
    "own hidden": ("with causal=True", "does not see its own key"),
    "top left": ("fewer queries than keys", "top left"),
    "two blocks": ("right up to 8 keys, wrong with 9", "the keys end too early"),
    "hidden at -5": ("where a mask is given", "set to -5 instead of -inf"),
    "hidden at 0": ("where a mask is given", "set to 0 instead of -inf"),
    "lowered by 3": ("where a mask is given", "-3 is added instead of -inf"),
    "over queries": ("softmax over the queries",),
    "phantoms": ("unless the number of keys is a multiple of 4", "more key", "of score 0"),
    "denominator": ("right up to 4 keys, wrong with 5", "the denominator is wrong"),
    "merge": ("right up to 4 keys, wrong with 5", "0 to 3 and 4 to", "blocks of keys are merged"),
    "factor": ("0.9 times", "after the softmax"),
    "shifted values": ("further on",),
    "loud": ("hidden keys are large", "over hidden keys too"),
}


@pytest.mark.parametrize("fault", SAID)
def test_what_is_said_of_a_wrong_kernel(fault: str) -> None:
    told = kernel_opinion(case_of(fault), Violation("it is wrong"))
    assert told is not None
    assert all(words in told for words in SAID[fault]), told


def test_nothing_is_said_of_a_right_kernel() -> None:
    assert kernel_opinion(case_of(""), Violation("it is wrong")) is None
    assert unsteady_opinion(case_of(""), Violation("it is wrong")) is None


def test_noise_and_work_in_place_are_told() -> None:
    assert "acts in eval mode" in (unsteady_opinion(case_of("noise"), Violation("it is wrong")) or "")
    assert "changes the queries in place" in (unsteady_opinion(case_of("in place"), Violation("it is wrong")) or "")
