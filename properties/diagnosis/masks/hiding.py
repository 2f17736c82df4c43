"""Why a padding mask does not hide what it must: which positions it hides instead, in which attention, from whom."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from veriformer.properties.causes.asking import answer_to, first_answer
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.causes.tracing.lines import Kept
from veriformer.properties.causes.tracing.localize import where_it_enters
from veriformer.properties.diagnosis.attentions import Attended, softmax_axes
from veriformer.properties.diagnosis.masks.amount import amount_cause
from veriformer.properties.diagnosis.masks.blocks import blocks_cause
from veriformer.properties.diagnosis.masks.masked import Masked
from veriformer.properties.diagnosis.masks.packed import packed_cause
from veriformer.properties.diagnosis.masks.placed import placed_cause, placed_in_batch
from veriformer.properties.diagnosis.masks.pooled import ends_of_others, pooled_cause, pooled_for_others
from veriformer.properties.diagnosis.masks.reread import reread_cause
from veriformer.properties.diagnosis.masks.scaled import normaliser_cause, scaled_cause
from veriformer.properties.diagnosis.masks.shifted import instead_cause
from veriformer.properties.diagnosis.places.batches import Batches
from veriformer.properties.diagnosis.places.samples import whose_mask
from veriformer.properties.engine.stream import Stream

_LEAST = 1e-9  # a weight below is that of a hidden key
_NEAR = 3  # positions that a convolution of usual width reaches; what is seen from further off may be anything


def hiding_cause(stream: Stream, side: str = "") -> str | None:
    """Explain how hidden content, or the amount of padding, reaches outputs; silent where that cannot be measured.

    Args:
        stream: the subject that failed.
        side: on which the amount of padding matters, if that is what failed.
    """
    with off_the_record(stream.case):
        return answer_to(lambda: _hiding_cause(stream, side))


def batch_cause(stream: Stream, x: Tensor, order: list[int]) -> str | None:
    """Explain why permuted samples give other outputs, where they do with masks alone."""
    try:
        with off_the_record(stream.case):
            masked = Masked(stream.case, stream)
            x = x.to(masked.built.dtype) if x.is_floating_point() else x
            if bool(masked.moved(masked(x[order]), masked(x)[order]).any()):
                return None
    except Exception:  # another measurement may still tell
        return None
    return hiding_cause(stream)


def _hiding_cause(stream: Stream, amount_on: str) -> str | None:
    masked = Masked(stream.case, stream)
    causal = bool(stream.case.subject.fact("causal")) and masked.per_position
    side = "right" if masked.side == "right" or (masked.side == "both" and not causal) else "left"
    if told := _left_behind(masked, side):
        return told
    if told := _decided_by_one(masked, side) or reread_cause(masked, side):
        return told
    x = masked.draw(1)
    mask = masked.padded(x, [masked.real], side)
    hidden = [s for s in range(masked.length) if not mask[0, s]]
    seen = masked.is_seen(x, mask)
    shown = [s for s in hidden if seen[s]]
    if shown:
        measures: tuple[Callable[[], str | None], ...] = (
            lambda: _pooled(masked),
            lambda: instead_cause(masked),
            lambda: _in_attentions(masked, x, mask, side),
            lambda: _before_attentions(masked, x, mask),
            lambda: blocks_cause(masked, side),
            lambda: scaled_cause(masked, x, mask),
            lambda: normaliser_cause(masked, x, mask),
            lambda: _from_neighbours(masked, x, mask, shown, hidden),
            lambda: _enters(masked, x, mask),
        )
    else:
        measures = (
            lambda: _of_others(masked, side),
            lambda: instead_cause(masked),
            lambda: _pooled(masked),
            lambda: placed_cause(masked, amount_on) if amount_on else None,
        )
    return first_answer((*measures, lambda: amount_cause(masked, amount_on) if amount_on else None))


def _decided_by_one(masked: Masked, side: str) -> str | None:
    """Tell whether padding is hidden only where one sample of the batch, the first or the last, has some too."""
    x, full, real = masked.draw(3), masked.length, masked.real
    other = masked.stream.other(x)
    seen = {}
    for place, lengths in ((0, [full, real, real]), (2, [real, real, full]), (-1, [real, real, real])):
        mask = masked.padded(x, lengths, side)
        changed = torch.where(mask if x.ndim == 2 else mask[..., None], x, other)
        before, after = masked(x, mask), masked(changed, mask)
        seen[place] = bool(masked.at_real(masked.moved(after, before), mask).any())
    if seen[-1] or seen[0] == seen[2]:
        return None
    which = "first" if seen[0] else "last"
    return (
        f"padding is hidden where the {which} sample of a batch has some, and seen in all others where it has none: "
        f"the mask of the {which} sample alone decides whether a mask is applied"
    )


def _of_others(masked: Masked, side: str) -> str | None:
    """Tell whose mask each sample of a batch follows, and where its tokens stand."""
    ends = masked.padded(masked.draw(3), [masked.length - 3, masked.length - 1, max(1, masked.length - 6)], side)
    if masked.case.subject.kind == "classifier" and (told := pooled_for_others(masked) or ends_of_others(masked)):
        return told
    batches = Batches(masked.case, masked.clean(), masked.which, masked.per_position, tokenwise=False)
    return packed_cause(masked) or placed_in_batch(masked, ends) or whose_mask(batches)


def _left_behind(masked: Masked, side: str) -> str | None:
    """Tell whether a call changes its mask or its input, or an earlier mask is used in a later call."""
    x = masked.draw(2)
    first = masked.padded(x, [masked.real, masked.length - 1], side)
    second = masked.padded(x, [masked.length - 1, masked.real + 1], side)
    given, content = first.clone(), x.clone()
    with torch.no_grad():
        masked.on(masked.clean())(content, given)
    if not torch.equal(given, first):
        inverted = torch.equal(given, ~first)
        return f"a call changes the mask that it is given{' to its inverse' if inverted else ''}, in place"
    if not torch.equal(content, x):
        return "a call changes the input that it is given, in place, at padded positions"
    model = masked.clean()
    masked(x, first, model)
    after, right = masked(x, second, model), masked(x, second)
    if not bool(masked.at_real(masked.moved(after, right), second).any()):
        return None
    for used, told in (
        (first, "the mask of an earlier call of that shape is used again in place of the new one"),
        (first & second, "what an earlier call of that shape has hidden stays hidden: a kept mask is changed in place"),
    ):
        if not bool(masked.at_real(masked.moved(after, masked(x, used)), second & used).any()):
            return told
    return "with a mask, a call is right on a new model and wrong after a call with another mask"


def _in_attentions(masked: Masked, x: Tensor, mask: Tensor, side: str) -> str | None:
    """Read off the attentions which of them give padded keys a weight, and which one."""
    seen, plain = masked.attended(x, mask), masked.attended(x)
    if not seen or len(seen) != len(plain):
        return None
    over_keys, over_queries = (float((plain[0].weights.sum(axis) - 1).abs().max()) < 1e-3 for axis in (-1, -2))
    if not over_keys:
        if not over_queries:
            return None
        if softmax_axes(lambda: masked(x)) == {-1}:
            return (
                "the softmax runs over the last axis of the scores, and the sum with the values over the other one, so "
                "that the weights of a key sum to one over the queries: the weights are applied transposed"
            )
        return "the weights of a key sum to one over the queries: the softmax runs over queries"
    real = mask[0].cpu()
    leaks, shares = [], []
    for a in seen:
        queries = real if a.weights.shape[-2] == masked.length else torch.ones(a.weights.shape[-2], dtype=torch.bool)
        rows = a.weights.cpu()[..., queries, :]
        leaks.append(bool((rows[..., ~real] > _LEAST).any()))
        shares.append(float(rows[..., ~real].sum(-1).mean()))
    if not any(leaks):
        return None
    many = len(seen)
    wrong = [c for c, leak in enumerate(leaks) if leak]
    first, without = seen[0], plain[0]
    if wrong[0] == 0 and first.weights.shape == without.weights.shape and first.weights.shape[-2] == masked.length:
        told = _over_queries(masked, x, mask, first, without)
        if told:
            return told + (f"; attention {wrong[-1] + 2} of {many} hides padding" if len(wrong) < many else "")
    if len(wrong) < many:
        return _some_leak(masked, seen, wrong, real)
    if first.weights.shape[-2] == masked.length and not bool(
        (first.weights.cpu()[..., real, :][..., real] > _LEAST).any()
    ):
        return "real keys get no weight and padded ones all of it: the mask is inverted"
    score = _hidden_score(first, real)
    told = f"padded keys get {shares[0]:.2g} of the weight of a real query in attention 1 of {many}"
    return f"{told}: {score}" if score else told


def weighs_padding(stream: Stream, x: Tensor, mask: Tensor) -> bool | None:
    """Return whether an attention gives hidden keys a weight; None where none is seen, as in a fused kernel."""
    real = mask[0].cpu()
    seen = Masked(stream.case, stream).attended(x, mask)
    rows = [a.weights.cpu()[..., real, :] if a.weights.shape[-2] == len(real) else a.weights.cpu() for a in seen]
    return any(bool((w[..., ~real] > 0).any()) for w in rows) if rows else None


def _over_queries(masked: Masked, x: Tensor, mask: Tensor, first: Attended, without: Attended) -> str | None:
    """Tell a mask over the rows of the first attention, and one that does nothing there."""
    real = mask[0].cpu()
    if not bool((without.weights.cpu()[..., real, :][..., ~real] > _LEAST).any()):
        return None
    same = (first.weights - without.weights).abs().cpu() <= 1e-6
    if not bool(same[..., real, :].all()):
        return None
    if not bool(same[..., ~real, :].all()):
        return (
            "the weights of real queries are those without a mask, those of padded queries are not: the mask is laid "
            "over the queries (rows) instead of the keys (columns)"
        )
    if not bool(masked.moved(masked(x, mask), masked(x)).any()):
        return "the output with the mask equals the output without it: the padding mask is not applied"
    return None


def _some_leak(masked: Masked, seen: list[Attended], wrong: list[int], real: Tensor) -> str | None:
    many = len(seen)
    crossing = [c for c, a in enumerate(seen) if a.weights.shape[-2] != masked.length]
    if masked.case.subject.kind == "encoder_decoder" and crossing and wrong == crossing:
        return (
            "the encoder's attentions give padded source positions no weight and the decoder's cross-attentions do: "
            "the source mask is not used in the cross-attention"
        )
    right = [c for c in range(many) if c not in wrong]
    if masked.case.subject.kind == "encoder_decoder" and crossing and right == crossing:
        return (
            "the decoder's cross-attentions give padded source positions no weight and the encoder's attentions do: "
            "the source mask is not used inside the encoder"
        )
    names = ", ".join(str(c + 1) for c in wrong)
    inverted = all(
        bool(((w[..., real, :] if w.shape[-2] == masked.length else w)[..., real] <= _LEAST).all())
        for w in (seen[c].weights.cpu() for c in wrong)
    )
    if inverted:
        return (
            f"attention {', '.join(str(c + 1) for c in right)} of {many} hides padding, attention {names} hides the "
            "real positions and sees padding: the mask is inverted again on the way through the layers"
        )
    return (
        f"the mask does not reach attention {names} of {many}, which weighs padded keys; attention "
        f"{', '.join(str(c + 1) for c in right)} gives them no weight"
    )


_ONE_CONSTANT = (
    "each of them the same: their score is one finite constant instead of -inf, which a soft cap behind the mask makes "
    "of it, say"
)


def _is_one_constant(hidden: Tensor, shown: Tensor) -> bool:
    """Whether in every row of logarithms of weights the hidden ones are one number, and those shown are not."""
    return hidden.shape[1] > 1 and float((hidden.std(1) / shown.std(1)).max()) < 1e-3


def _hidden_score(a: Attended, real: Tensor) -> str | None:
    """Tell with which score hidden keys enter: from the weights, and the products of visible keys."""
    if a.weights.shape[:-2] != a.query.shape[:-2] or a.query.shape[:-2] != a.key.shape[:-2]:  # heads in groups, say
        rows = a.weights.double().cpu()[..., real, :] if a.weights.shape[-2] == len(real) else a.weights.double().cpu()
        logs = rows.clamp(min=1e-300).log().flatten(0, -2)
        return _ONE_CONSTANT if _is_one_constant(logs[:, ~real], logs[:, real]) else None
    product = (a.query.double() @ a.key.double().transpose(-2, -1)).cpu()
    weights = a.weights.double().cpu()
    rows = real if weights.shape[-2] == len(real) else torch.ones(weights.shape[-2], dtype=torch.bool)
    product, logs = product[..., rows, :].flatten(0, -2), weights.clamp(min=1e-300).log()[..., rows, :].flatten(0, -2)
    usable = (weights[..., rows, :].flatten(0, -2)[:, real] > 1e-12).all(dim=1)
    product, logs = product[usable], logs[usable]
    p, w = product[:, real], logs[:, real]
    if p.shape[1] < 3 or not len(p):
        return None
    p0, w0 = p - p.mean(1, keepdim=True), w - w.mean(1, keepdim=True)
    scale = float((p0 * w0).sum() / p0.square().sum())
    if float((w0 - scale * p0).abs().max()) > 1e-3 or scale <= 0:  # a bias, or another score
        return _ONE_CONSTANT if _is_one_constant(logs[:, ~real], w0) else None
    base = (w - scale * p).mean(1, keepdim=True)
    entered = logs[:, ~real] - base
    added = entered - scale * product[:, ~real]
    if float(entered.std()) < 1e-3:
        value = float(entered.mean())
        value = 0.0 if abs(value) < 1e-3 else value
        more = " (multiplied by the mask, or filled with a number that is no -inf)" if value == 0 else ""
        return f"they enter the softmax with a score of {value:.4g} instead of -inf{more}"
    if float(added.std()) < 1e-3:
        value = float(added.mean())
        if abs(value) < 1e-3:
            return "they enter with their own scores, the mask is not applied to them"
        return f"the mask adds {value:.4g} to their scores, too little for -inf"
    return None


def _pooled(masked: Masked) -> str | None:
    return pooled_cause(masked) if masked.case.subject.kind == "classifier" else None


def _before_attentions(masked: Masked, x: Tensor, mask: Tensor) -> str | None:
    """Tell whether keys, values or queries of real positions change with hidden content, before anything attends."""
    real = mask[0].cpu()
    other = torch.where(mask[..., None] if x.ndim == 3 else mask, x, masked.stream.other(x))
    one, two = masked.attended(x, mask), masked.attended(other, mask)
    if not one or len(one) != len(two):
        return None
    a, b = one[0], two[0]
    parts = {"queries": (a.query, b.query), "keys": (a.key, b.key), "values": (a.value, b.value)}
    changed, scaled = [], True
    for name, (before, after) in parts.items():
        if before.shape[-2] != len(real):
            continue
        before, after = before.cpu()[..., real, :].double(), after.cpu()[..., real, :].double()
        far = (after - before).abs()
        if float(far.max()) > 1e-6 * float(before.abs().max()):
            changed.append(name)
            ratio = after / before
            scaled &= float((ratio - ratio.mean(-2, keepdim=True)).abs().max()) < 1e-4 * float(ratio.abs().max())
            rows = (far.amax(-1).flatten(0, -2).amax(0) > 1e-6 * float(before.abs().max())).nonzero().flatten()
            places = real.nonzero().flatten()[rows].tolist()
            if len(places) < int(real.sum()):
                hidden = (~real).nonzero().flatten()
                reach = max(int((hidden - p).abs().min()) for p in places)
                return (
                    f"the {' and '.join(changed)} of the real positions {places} beside padding change with its "
                    f"content before anything attends: it enters from up to {reach} positions away, as through a "
                    "convolution over padded positions that are not zeroed"
                )
    if not changed:
        return None
    told = " and ".join([", ".join(changed[:-1]), changed[-1]] if len(changed) > 1 else changed)
    kept = [name for name in parts if name not in changed]
    how = "each channel is scaled by one factor at all positions" if scaled else "they are mixed over positions"
    rest = f", {' and '.join(kept)} do not" if kept else ""
    return (
        f"the {told} of real positions change with hidden content before anything attends{rest}, and padded keys get "
        f"no weight: {how}, as by a norm (or a mean) over time instead of over the channels of a position"
    )


def _from_neighbours(masked: Masked, x: Tensor, mask: Tensor, shown: list[int], hidden: list[int]) -> str | None:
    """Tell padding that is seen next to real positions alone from padding that is seen everywhere."""
    real = [t for t in range(masked.length) if t not in hidden]
    reach = max(min(abs(s - t) for t in real) for s in shown)
    if not masked.attended(x, mask):
        return None
    if len(shown) < len(hidden) and reach <= _NEAR:
        return (
            f"no attention gives padded keys a weight, and padding within {reach} positions of a real one is seen: it "
            "enters from neighbours, as through a convolution over padded positions that are not zeroed"
        )
    return None


def _enters(masked: Masked, x: Tensor, mask: Tensor) -> str | None:
    """Name the part behind which real positions first depend on hidden content, though no attention weighs it."""
    real = mask[0].nonzero().flatten().tolist()
    other = torch.where(mask[..., None] if x.ndim == 3 else mask, x, masked.stream.other(x))
    built, kept = masked.clean(), Kept({masked.length: real})
    place = where_it_enters(
        built.module, lambda: masked(x, mask, built), lambda: masked(other, mask, built), kept, 1e-6, kept
    )
    if not place:
        return None
    told = f"what the mask hides reaches real positions {place}"
    if "the mask is inverted" in place:
        return told
    return f"{told}{answer_to(lambda: _mixed(masked, x, mask)) or ': no mask is applied there'}"


def _mixed(masked: Masked, x: Tensor, mask: Tensor) -> str | None:
    """Say that tokens of other samples come through as those do that the mask hides."""
    masks = torch.cat([mask, mask])
    beside_one, beside_other = (masked(torch.cat([x, y]), masks)[:1] for y in (x, masked.stream.other(x)))
    if not bool(masked.moved(beside_one, beside_other).any()):
        return None
    return (
        ", and so do the tokens of other samples: they are mixed there, whatever the mask, as where what was sorted or "
        "reshaped is not put back"
    )
