"""Decoding: a cache changes the time, not the answer."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.case import Case
from veriformer.properties.compare import worst_difference
from veriformer.properties.pool import Built
from veriformer.properties.premises import needs_mask, needs_part
from veriformer.properties.property import holds
from veriformer.properties.violations import SubjectError

_KIND = ("decoder",)


def _with_cache(case: Case, built: Built, chunks: list[Tensor], mask: Tensor | None = None) -> Tensor:
    given = {} if mask is None else {"attention_mask": mask}
    with torch.no_grad():  # as in generation: a cache that a model keeps holds no graph
        output = case.bench.call(case.subject.cache, built.module, chunks, **given)
    if not isinstance(output, Tensor):
        raise SubjectError(f"cache returned {type(output).__name__}; outputs [B, T, *] of all chunks are required")
    return output


def _split(case: Case, x: Tensor) -> list[Tensor]:
    """Cut a sequence into chunks: single tokens, a prompt and single tokens, two halves, or anything."""
    length = x.shape[1]
    form = case.choice("chunks", ("single", "prompt", "halves", "mixed"))
    if form == "single":
        sizes = [1] * length
    elif form == "prompt":
        prompt = case.integer("prompt", 1, length - 1)
        sizes = [prompt, *[1] * (length - prompt)]
    elif form == "halves":
        sizes = [length // 2, length - length // 2]
    else:
        sizes, left = [], length
        while left:
            sizes.append(case.integer("chunk", 1, min(3, left)))
            left -= sizes[-1]
    return list(x.split(sizes, dim=1))


@holds(
    "decoding.cache",
    statement="Decoding chunk by chunk through the cache gives what the whole sequence gives at once.",
    formula="f_cache(x_1..a), f_cache(x_a+1..b), ... = f(x), for every cut",
    source="Keys and values of the past do not change: a consequence of causality (Shazeer 2019, section 2.4).",
    kinds=_KIND,
    unless=needs_part("cache"),
    sweeps_lengths=True,
    requires=("causality.no-future-influence",),
    catches=("KV01", "KV02", "KV08", "KV11", "RB05"),
)
def the_cache_changes_nothing(case: Case) -> None:
    """Single tokens hide a mask that is wrong inside a chunk, whole prompts hide positions that do not go on; so all
    forms of cut are drawn, and another sequence is decoded before, that must leave nothing behind.
    """
    built, length = case.built(), case.length("T", low=2)
    x = case.tokens(2, length)
    expected = case.call(built, x)
    if case.flag("another before"):
        _with_cache(case, built, [case.tokens(2, length)])
    chunks = _split(case, x)
    got = _with_cache(case, built, chunks)
    sizes = [chunk.shape[1] for chunk in chunks]
    case.close(got, expected, "decoding through the cache gives another output than the whole sequence at once",
               cause=lambda: _cause(case, got, expected, sizes))  # fmt: skip
    case.witness()


def _cause(case: Case, got: Tensor, expected: Tensor, sizes: list[int]) -> str | None:
    """Say where the two part."""
    limit = worst_difference(expected, torch.zeros_like(expected)).error * case.tolerance()
    wrong = ((got - expected).abs().amax(dim=(0, 2)) > limit).nonzero().flatten().tolist()
    if not wrong:
        return None
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    if wrong[0] == 0:
        return "the first output is wrong already: the cache is not empty at the start, or keys or values are mixed up"
    if wrong[0] in starts:
        return (
            f"outputs part where chunk {starts.index(wrong[0]) + 1} begins: the past, or its positions, are lost there"
        )
    return f"outputs part inside a chunk, at position {wrong[0]}: its mask does not fit the cached past"


@holds(
    "decoding.left-padding",
    statement="Decoding with the cache and left padding gives what the whole padded batch gives.",
    formula="f_cache(chunks, mask) = f(x, mask) at real positions",
    source="Batched generation pads prompts on the left.",
    kinds=_KIND,
    level="extended",
    unless=(needs_part("cache"), needs_mask("padding")),
    requires=("decoding.cache",),
    catches=("KV10",),
)
def left_padding_goes_through_the_cache(case: Case) -> None:
    """The mask of the past must be kept with the cache, and positions counted from the first real token."""
    if case.subject.fact("padding_side") not in ("left", "both"):
        case.does_not_apply("left padding is not declared to be supported (padding_side)")
    built, length = case.built(), case.integer("T", 4, 8)
    x = case.tokens(2, length)
    pads = case.integer("pads", 1, length - 2)
    mask = torch.ones(2, length, dtype=torch.bool, device=x.device)
    mask[0, :pads] = False
    expected = case.call(built, x, attention_mask=mask)
    got = _with_cache(case, built, _split(case, x), mask)
    case.close(
        got[mask], expected[mask], "with left padding the cache gives another output than the whole batch at once"
    )
    case.witness()
