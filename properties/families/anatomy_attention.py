"""The attentions inside a whole model, each judged by what really flows through it: scale, softmax, mask."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import HIDDEN, Attention, followed, is_part_of_rows
from veriformer.properties.anatomy.flow import BATCH, Flow, flow, of_other_sizes
from veriformer.properties.anatomy.sources import Head
from veriformer.properties.anatomy.sublayers import (
    dealt_in_turns,
    not_normalised,
    scrambled_merges,
    unlike_keys_and_values,
)
from veriformer.properties.anatomy.traced import Traced, traced
from veriformer.properties.causes.influence_maps import causal_region
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.diagnosis.attention.merged import merge_words
from veriformer.properties.diagnosis.masks.inside import allowed_in, mask_cause
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.families.anatomy_caps import scores_are_capped
from veriformer.properties.families.anatomy_scales import NEAR, folded_scales, products_have_the_scale, scale_cause
from veriformer.properties.families.anatomy_weights import scores_are_of_one_layer, scores_pass_a_softmax
from veriformer.properties.families.similarity import similarities_are_even
from veriformer.properties.probes.sizes.own_sizes import fields_read
from veriformer.properties.subject.facts import SCALES, attention_scale
from veriformer.properties.subject.subject import Subject

KINDS = ("self_attention", "cross_attention", "layer", "encoder", "decoder", "encoder_decoder", "classifier")
_PAPER = "Vaswani et al. 2017, section 3.2."


@holds(
    "anatomy.scale",
    statement="In every attention inside a model every head multiplies q k^T by the declared scale (1/sqrt(d_head)).",
    formula="log A_h = s q_h k_h^T + bias + a constant a row, with q_h and k_h as they leave their projections",
    source=_PAPER,
    kinds=KINDS,
    unless=(needs_module, excludes_fact("query_key_norm"), excludes_fact("quantised")),
    examples_factor=0.2,
    goes_wide=True,
    catches=("SC02", "SC04"),
)
def every_head_has_the_scale(case: Case) -> None:
    """The scale is fitted to the weights that really flow, whatever the order of projecting, scaling, biasing and
    masking, and goes back to what the projections gave: scaling queries before or keys after counts as well. A
    temperature that is a parameter is no constant to be held to, unless one is declared. What compares samples of two
    sides by normalised vectors is held to the names of its own temperature. Capped scores are held to their cap too.
    """
    flowing = flow(case)
    if cap := case.subject.fact("soft_cap"):
        scores_are_capped(case, flowing, float(cap))
        return
    similarities_are_even(case, flowing)
    names = [
        (a.place, h, len(a.scale), a.query.shape[-1])
        for a in followed(flowing.seen) for h, s in enumerate(a.scale) if s is not None
    ]  # fmt: skip
    products_have_the_scale(case, flowing)
    if not names:
        case.does_not_apply("no attention could be followed from its projections to its weights")
    found = case.apply(scales, flowing.seen)
    declared = case.subject.fact("attention_scale")
    wanted = torch.tensor([attention_scale(declared, k, flowing.width) for *_, k in names], dtype=torch.float64)
    if bool(((found / wanted - 1).abs() >= NEAR).any()):
        found = found * case.apply(folded_scales, flowing.seen, flowing.module)
    off = (found / wanted - 1).abs()
    if declared is None and bool(off.amax() >= NEAR) and _is_learned(case, flowing):
        case.does_not_apply("the scale of its scores is a parameter, and no constant is declared")
    case.witness()
    worst = int(off.argmax())
    place, head, heads, d_head = names[worst]
    measured, right = float(found[worst]), float(wanted[worst])
    lone = [n for n, o in zip(names, off.tolist(), strict=True) if o > NEAR]
    case.require(
        off.amax() < NEAR,
        f"in {place or 'the model'} head {head} of {heads} multiplies q k^T by {measured:.6g}, not by {right:.6g}",
        got=f"{measured:.6g}",
        expected=f"{right:.6g}",
        error=off.amax(),
        tolerance=NEAR,
        cause=lambda: scale_cause(lone, names, measured, right, d_head, flowing),
        asks=("attention_scale", _named(measured, d_head, flowing.width)) if len(lone) == len(names) else None,
    )


def scales(seen: Traced) -> Tensor:
    """Return the scale of every head of every attention that can be followed, in order, float64."""
    return torch.tensor([s for a in followed(seen) for s in a.scale if s is not None], dtype=torch.float64)


def _is_learned(case: Case, flowing: Flow) -> bool:
    """Whether scales follow parameters of one number a head or a model, which no projection and no norm has."""
    config = flowing.built.config
    counts = {1, config.num_heads, config.num_layers, config.num_heads * config.num_layers}
    with off_the_record(case):
        twin = case.copy_of(flowing.built)
        before = scales(traced(twin.module, case.caller(twin, *flowing.inputs), BATCH, flowing.limit))
        with torch.no_grad():
            for parameter in twin.module.parameters():
                if parameter.numel() in counts and parameter.is_floating_point():
                    parameter.mul_(1.25)
        after = scales(traced(twin.module, case.caller(twin, *flowing.inputs), BATCH, flowing.limit))
    return before.shape == after.shape and bool(((after / before - 1).abs() > 10 * NEAR).any())


def _named(scale: float, d_head: int, d_model: int) -> str | float:
    """Return the name of a scale, or the number."""
    for name, formula in SCALES.items():
        if abs(formula(d_head, d_model) / scale - 1) < NEAR:
            return name
    return float(f"{scale:.6g}")


@holds(
    "anatomy.softmax",
    statement="In every attention of a model weights are normalised over the keys, and weigh the values of these keys.",
    formula="A_h = softmax over s; output_h = A_h v_g with the values of the group whose keys gave A_h",
    source=_PAPER,
    kinds=KINDS,
    unless=(needs_module, excludes_fact("quantised")),
    examples_factor=0.2,
)
def weights_are_normalised_over_keys(case: Case) -> None:
    """A softmax over queries gives outputs of the right shape. Grouped heads share keys and values: a head that takes
    the keys of one group and the values of another mixes two heads. Chunks of keys are summed up elsewhere.
    """
    flowing = flow(case)
    least = min(flowing.length, flowing.other or flowing.length)
    known = _of_whole_rows(flowing.seen, least)
    scores_are_of_one_layer(case, flowing)
    if not known:
        scores_pass_a_softmax(case, flowing)
        case.does_not_apply("no attention could be followed from its scores to its weights")
    sums = case.apply(row_sums, flowing.seen, least)
    worst = int((sums - 1).abs().argmax())
    place, total = known[worst].place or "the model", float(sums[worst])
    case.witness()
    if not case.subject.fact("sink"):
        case.require(
            (sums - 1).abs().amax() < 100 * flowing.limit,
            f"in {place} rows of attention weights do not sum to 1",
            got=f"{total:.6g}",
            expected="1",
            error=(sums - 1).abs().amax(),
            tolerance=100 * flowing.limit,
            cause=lambda: _sum_cause(flowing.seen, known[worst], total, place),
            asks=("sink", True) if total < 1 and known[worst].over == "keys" else None,
        )
    crossed = case.apply(crossed_groups, flowing.seen)
    which = next((a.place for a in followed(flowing.seen) if _crosses(a)), "") or "the model"
    case.require(
        crossed == 0,
        f"in {which} heads weigh the values of other heads' keys",
        got=f"{int(crossed)} attentions",
        expected="none",
        cause=lambda: f"keys and values are dealt to the heads in two different orders in {which}",
    )
    mixed = scrambled_merges(flowing.seen)
    where = (mixed or [""])[0] or "the model"
    case.require(
        case.apply(scrambled, flowing.seen) == 0,
        f"what the heads in {where} give is merged as it lies in memory",
        got=f"{len(mixed)} attentions",
        expected="heads of a token side by side",
        cause=lambda: merge_words(mixed[0]),
    )
    if case.subject.fact("query_key_norm"):
        plain = not_normalised(flowing.seen)
        where = (plain or [""])[0] or "the model"
        case.require(
            case.apply(plain_attentions, flowing.seen) == 0,
            f"in {where} queries or keys enter the scores as they are, where query_key_norm is declared",
            got=f"{len(plain)} attentions",
            expected="none",
            cause=lambda: f"queries or keys are not normalised in {where}",
        )
    if case.subject.fact("structure") != "other":
        _of_one_making(case, flowing)


def _with_groups(case: Case, flowing: Flow) -> Flow:
    """Return a forward of sizes with several groups of several heads, where `build` takes the number of groups."""
    grouped = next((c for c in case.bench.configs if c.has_groups), None)
    read = fields_read(case.bench, flowing.built.config)
    if flowing.built.config.has_groups or grouped is None or "num_key_value_heads" not in read:
        return flowing
    return of_other_sizes(flowing, grouped) or flowing


def _of_one_making(case: Case, flowing: Flow) -> None:
    """Ask where keys are made of other tokens than values, or groups are dealt to the heads in turns."""
    grouped = _with_groups(case, flowing)
    for count, seen, odd, told in (
        (
            unlike_makers, flowing.seen, unlike_keys_and_values(flowing.seen),
            "keys are made of other tokens than values: one of them has passed a norm, or has positions",
        ),
        (
            groups_in_turns, grouped.seen, dealt_in_turns(grouped.seen),
            "groups of keys are dealt to the heads in turns (0 1 0 1): checkpoints have them in blocks (0 0 1 1)",
        ),
    ):  # fmt: skip
        case.require(
            case.apply(count, seen) == 0,
            f"in {(odd or [''])[0] or 'the model'} {told}",
            got=f"{len(odd)} attentions",
            expected="none",
            cause=lambda odd=odd, told=told: f"in {(odd or [''])[0] or 'the model'} {told}",  # type: ignore[misc]
            asks=("structure", "other"),
        )


def scrambled(seen: Traced) -> Tensor:
    """Return how many attentions merge their heads without changing them back with positions."""
    return torch.tensor(len(scrambled_merges(seen)))


def unlike_makers(seen: Traced) -> Tensor:
    """Return how many attentions have keys that are made of other tokens than their values."""
    return torch.tensor(len(unlike_keys_and_values(seen)))


def plain_attentions(seen: Traced) -> Tensor:
    """Return how many attentions have queries, or keys, that pass no norm."""
    return torch.tensor(len(not_normalised(seen)))


def groups_in_turns(seen: Traced) -> Tensor:
    """Return how many attentions deal their groups of keys in turns."""
    return torch.tensor(len(dealt_in_turns(seen)))


def _of_whole_rows(seen: Traced, least: int) -> list[Attention]:
    """Return the attentions over so many keys at least, whose rows are no parts of longer ones: these sum to less."""
    return [a for a in followed(seen) if a.hidden.shape[-1] >= least and not is_part_of_rows(seen, a)]


def row_sums(seen: Traced, least: int) -> Tensor:
    """Return, of each attention over so many keys, the sum of weights that is furthest from 1, float64."""
    sums = [a.weights.sum(-1).flatten() for a in _of_whole_rows(seen, least)]
    return torch.stack([s[(s - 1).abs().argmax()] for s in sums])


def _sum_cause(seen: Traced, attention: Attention, total: float, place: str) -> str:
    if attention.over == "queries":
        made = [v.output for v in seen.values[: attention.when] if v.name in ("softmax", "_softmax")]
        made = [w for w in made if w.numel() == attention.weights.numel()]
        if made and bool(((made[-1].sum(-1) - 1).abs() < NEAR).all()):
            return (
                f"the softmax in {place} runs over the last axis, and the sum with the values over the other one: the "
                "weights are applied transposed"
            )
        return f"the softmax in {place} runs over the queries: its columns sum to 1, not its rows"
    sums = attention.weights.sum(-1)
    if float(sums.max() - sums.min()) < NEAR:
        return f"all weights in {place} are those of a softmax times {total:.4g}"
    return f"a part of {1 - total:.3g} of the softmax in {place} goes to no key"


def crossed_groups(seen: Traced) -> Tensor:
    """Return how many attentions give heads the keys of one group and the values of another."""
    return torch.tensor(sum(_crosses(a) for a in followed(seen)))


def _crosses(attention: Attention) -> bool:
    """Whether heads that share their keys do not share their values, and as many parts serve them all."""
    keys, values = _dealt(attention.key_from), _dealt(attention.value_from)
    if keys is None or values is None or not 1 < len(set(keys)) == len(set(values)) < len(keys):
        return False
    return len(set(zip(keys, values, strict=True))) > len(set(keys))


def _dealt(sources: list[Head | None]) -> list[tuple[int, int]] | None:
    """Return for each head which part of which product it takes; None where some is not known."""
    parts = [(s.when, s.start) for s in sources if s is not None]
    return parts if len(parts) == len(sources) else None


def _hides_by_design(subject: Subject) -> str | None:
    if subject.fact("sparse"):
        return "which keys are hidden by design is not declared: it is declared to be sparse"
    if subject.fact("causal") is None:
        return "the fact 'causal' is neither declared nor known"
    return None


@holds(
    "anatomy.mask",
    statement="Every head of every layer hides the keys that the declared mask hides, and no other.",
    formula="A_h(t, s) = 0  <=>  s > t, or s <= t - w with a window of w",
    source="Vaswani et al. 2017, section 3.2.3; Beltagy et al. 2020, section 3.1.",
    kinds=KINDS,
    unless=(needs_module, _hides_by_design, excludes_fact("quantised")),
    examples_factor=0.2,
)
def every_head_has_the_mask(case: Case) -> None:
    """Through a stack a layer that hides too much is made up for by the others, and a window that is one too wide is
    lost in their reach: so the weights of each are looked at. Without a mask argument nothing is padding. Layers with
    a window beside layers without one are a design, where no window is declared.
    """
    flowing = flow(case)
    known = [(i, a, w) for i, a in enumerate(followed(flowing.seen)) if (w := allowed_in(flowing, a)) is not None]
    if not known:
        case.does_not_apply("no attention over its sequences could be followed")
    whole = any(torch.equal(a.hidden, (~w).expand_as(a.hidden)) for _, a, w in known)
    for number, attention, allowed in known:
        is_said = bool(case.subject.declares.get("window")) and "window" not in case.subject.guesses
        may_be = not is_said and case.subject.declares.get("sparse") is not False
        if whole and may_be and _is_local(attention.hidden):
            continue
        if whole and may_be and _sees_the_past(attention.hidden) and case.subject.fact("window"):
            case.witness()
            continue  # a window that nobody declared is that of some layers
        hidden, seen = case.apply(hidden_keys, flowing.seen, number), case.apply(seen_keys, flowing.seen, number)
        hidden |= ~allowed & ~seen  # its score may be too low to tell, and nothing of it is seen
        wrong = hidden != ~allowed
        case.witness()
        head, t, s = (int(i) for i in wrong.nonzero()[0]) if bool(wrong.any()) else (0, 0, 0)
        sees = "does not see" if bool(hidden[head, t, s]) else "sees"
        place = attention.place or "the model"
        case.require(
            ~wrong.any(),
            f"in {place} head {head} of {len(hidden)}: query {t} {sees} key {s}",
            got=f"{int((hidden[head] & allowed).sum())} too many hidden, {int((~hidden[head] & ~allowed).sum())} seen",
            expected="those of the declared mask",
            cause=partial(
                _mask_words,
                hidden,
                allowed,
                place,
                [a.hidden for _, a, _ in known],
                case.subject.declares.get("window"),
            ),
            asks=("sparse", True) if bool((hidden | allowed).all()) else None,
        )


def _mask_words(hidden: Tensor, allowed: Tensor, place: str, every: list[Tensor], window: int | None) -> str | None:
    """Say how a mask differs, and whether those of all attentions do."""
    told = mask_cause(hidden, allowed, place)
    if told and window:
        for more, why in ((1, "one too many: <= stands for <"), (-1, "one too few: < stands for <=")):
            if torch.equal(hidden[0], ~causal_region(hidden.shape[-1], window + more)):
                return f"in {place} queries see the last {window + more} keys, where {window} are declared, {why}, say"
    if told is None or window or len(every) < 2 or not all(_is_local(one) for one in every):
        return told
    besides = f"so they do in all {len(every)} attentions, and none is global: one mask may serve layers of two sorts"
    return f"{told}; {besides}"


def _sees_the_past(hidden: Tensor) -> bool:
    """Whether all heads see the whole past, `[H, T, T]`."""
    square = hidden.shape[-1] == hidden.shape[-2]
    return square and torch.equal(hidden, (~causal_region(hidden.shape[-1])).expand_as(hidden))


def _is_local(hidden: Tensor) -> bool:
    """Whether all heads see one window of the past, `[H, T, T]`; one that leaves out the farthest key alone may err."""
    length = hidden.shape[-1]
    if hidden.shape[-2] != length:
        return False
    return any(torch.equal(hidden, (~causal_region(length, w)).expand_as(hidden)) for w in range(2, length - 1))


def hidden_keys(seen: Traced, number: int) -> Tensor:
    """Return `[H, T, S]`: which keys no sample's query sees in the attention of a number among those followed."""
    return followed(seen)[number].hidden


def seen_keys(seen: Traced, number: int) -> Tensor:
    """Return `[H, T, S]`: which keys some sample's query gives a weight in the attention of a number."""
    return (followed(seen)[number].weights > HIDDEN).any(0)
