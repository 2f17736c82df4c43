"""Attention attends: outputs depend on other positions, and by content."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.engine.attending import Attending
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import SEQUENCES, Stream
from veriformer.properties.families.attention_ghosts import no_key_without_token
from veriformer.properties.families.attention_sums import summed_away

_LENGTH = 5


@holds(
    "attention.attends",
    statement="What stands at one position changes outputs at others, and attention weighs it by content.",
    formula="d f(x)_t / d x_s != 0 for some s != t; for attention d^2 f(x)_t / d x_s d x_t != 0 besides",
    source="Vaswani et al. 2017, section 3.2: weights are computed from the query and the key.",
    kinds=("attention", *SEQUENCES),
    examples_factor=0.4,
)
def outputs_attend(case: Case) -> None:
    """The other side of all that must not matter: a linear map, a running mean or the first token alone leave most of
    it alone too. A pooled output must depend on more than one position. In attention itself, what an output takes from
    another position depends on its own content too: in a fixed mixture the two act one beside the other. A token by
    itself attends to itself: keys of zeros, by which windows are filled up, are none.
    """
    if case.subject.kind == "attention":
        _weighs(case)
        return
    if case.subject.fact("window") == 1:
        case.does_not_apply("a window of 1 sees no other position")
    crossing = case.subject.kind == "cross_attention"  # its queries do not see one another
    stream = Stream(case, case.built(), side="source" if crossing else "target")
    length = case.fitting(_LENGTH)
    x = stream.draw(8, length)
    moved = [_replaced(stream, x, place) for place in range(length)]
    before, after = stream(x), [stream(y) for y in moved]
    if stream.per_position:
        causal = bool(case.subject.fact("causal"))
        got = [y[:, place + 1 :] if causal else _without(y, place) for place, y in enumerate(after[: length - causal])]
        was = [before[:, p + 1 :] if causal else _without(before, p) for p in range(length - causal)]
        case.differs(
            torch.cat(got, dim=1), torch.cat(was, dim=1),
            "no output depends on what stands at another position: each position is on its own",
            cause=lambda: summed_away(lambda: stream(x)),
        )  # fmt: skip
    else:
        seen = [p for p in range(length) if not torch.equal(after[p], before)]
        case.require(
            torch.stack([(y != before).any() for y in after]).sum() > 1,
            "the output depends on one position at most, though the sequence has several",
            got=f"positions that matter: {seen}",
            expected="more than one",
        )
    if crossing or case.subject.kind == "self_attention":
        _mixes(case, stream, x, moved, before, after)
    if not crossing and case.subject.kind != "encoder_decoder":
        no_key_without_token(case, stream)
    case.witness()


def _mixes(case: Case, stream: Stream, x: Tensor, moved: list[Tensor], before: Tensor, after: list[Tensor]) -> None:
    """Replace what is seen, and the position that sees it: both together are not the sum of each alone."""
    last = x.shape[1] - 1
    if case.subject.kind == "cross_attention":
        queries, _ = stream.inputs(x)
        others = stream.other(queries)
        alone, own, both = after[0], *(case.call(stream.built, others, memory) for memory in (x, moved[0]))
    else:
        others = stream.other(x)
        elsewhere, together = others.clone(), others.clone()
        elsewhere[:, last] = x[:, last]
        together[:, last] = moved[last][:, last]
        alone, own, both = stream(elsewhere), after[last], stream(together)
    case.differs(
        (both - own)[:, -1], (alone - before)[:, -1],
        "what an output takes from other positions does not depend on its own content: a fixed mixture, no attention",
    )  # fmt: skip


def _weighs(case: Case) -> None:
    drawn = Attending(case)
    if drawn.key.shape[2] < 2:
        case.reject("a single key has weight 1 whatever it is")
    plain = drawn()
    turned = {"query": drawn.query.flip(-1), "key": drawn.key.roll(1, dims=2), "value": -drawn.value}
    for name in turned:
        q, k, v = (turned[part] if part == name else None for part in ("query", "key", "value"))
        case.differs(drawn(q, k, v), plain, f"the output does not depend on the {name}")
    case.witness()


def _replaced(stream: Stream, x: Tensor, place: int) -> Tensor:
    changed = x.clone()
    changed[:, place] = stream.other(x)[:, place]
    return changed


def _without(output: Tensor, place: int) -> Tensor:
    return torch.cat([output[:, :place], output[:, place + 1 :]], dim=1)
