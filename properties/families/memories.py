"""Whether all layers of a decoder attend to one and the same memory; part of `layer.composition`."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import Attention, followed
from veriformer.properties.anatomy.flow import flow
from veriformer.properties.anatomy.sources import same_tokens
from veriformer.properties.anatomy.traced import Traced
from veriformer.properties.engine.case import Case


def layers_share_one_memory(case: Case) -> None:
    """Compare what the keys of each cross-attention are projected from, where that can be followed."""
    flowing = flow(case)
    if not flowing.other or flowing.other == flowing.length:
        return
    count = case.apply(different_memories, flowing.seen, flowing.length, flowing.other)
    known = _crossing(flowing.seen, flowing.length, flowing.other)
    if len(known) < 2:
        return
    places = [a.place or "the model" for a, _ in known]
    case.require(
        count == 0,
        "layers of the decoder attend to different memories",
        got=f"{int(count)} of {len(known)} are given something else than the last, {places[-1]}",
        expected="the output of the encoder in all of them",
        cause=lambda: (
            f"{places[0]} attends to something else than {places[-1]}: what the encoder gives by then, say, and "
            "not what it gives at its end"
        ),
        asks=("structure", "other"),
    )


def different_memories(seen: Traced, length: int, other: int) -> Tensor:
    """Return how many cross-attentions are given another memory than the last one."""
    known = _crossing(seen, length, other)
    if len(known) < 2:
        return torch.tensor(0)
    last = known[-1][1]
    return torch.tensor(sum(not same_tokens(x, last, seen.batch, 10 * seen.limit) for _, x in known[:-1]))


def _crossing(seen: Traced, length: int, other: int) -> list[tuple[Attention, Tensor]]:
    """Return the attentions of a target over a source, each with what its keys are projected from."""
    given = {p.when: p.left for p in seen.products}
    found = []
    for attention in followed(seen):
        head = next((h for h in attention.key_from if h is not None), None)
        lengths = {attention.query.shape[-2], attention.key.shape[-2]}
        if head is not None and head.when in given and lengths == {length, other}:
            found.append((attention, given[head.when]))
    return found
