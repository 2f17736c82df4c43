"""Mixtures of experts inside a whole model: what a router says is what its experts are weighted by."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.flow import flow
from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.calling import Caller
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.families.expert_parts import LARGEST, every_chosen_expert_has_a_part, exchanged, overwritten
from veriformer.properties.families.mixtures import Mixture, misfit_of_ratios, mixtures
from veriformer.properties.subject.subject import Subject

_OTHERWISE = excludes_fact("structure", "other")


def _weighs_otherwise(subject: Subject) -> str | None:
    """Apply, where the blocks are no textbook's, to a router that says itself what experts are mixed by."""
    return None if subject.router and subject.kind == "feed_forward" else _OTHERWISE(subject)


@holds(
    "router.weights",
    statement="The experts that a token takes are weighted as the router's scores of them are, by softmax or sigmoid.",
    formula="w_e / w_f = p_e / p_f for chosen e and f, with p = softmax(s) or sigmoid(s) of the scores s = W_r x",
    source="Shazeer et al. 2017, equations 3 to 5; Jiang et al. 2024 (Mixtral), section 2.1.",
    kinds=("feed_forward", "layer", "encoder", "decoder", "encoder_decoder", "classifier"),
    level="extended",
    unless=(needs_module, _weighs_otherwise),
    examples_factor=0.1,
)
def experts_are_weighted_by_their_scores(case: Case) -> None:
    """Each mixture is called again on the tokens that reached it while one expert gives ones and the others zeros: what
    comes out is that expert's weight. Where a token takes one expert alone nothing is to be compared; an expert that
    is called on some tokens, and has no weight in what comes out for one of them, was overwritten. Weights learnt
    apart from the scores, equal ones, or those of a temperature, are a question. A subject's own `router` is held to
    them as it is.
    """
    if case.subject.kind == "feed_forward":
        built = case.built()
        inputs: tuple[Tensor, ...] = (case.normal(4, 7, built.config.d_model, dtype=built.dtype),)
    else:
        flowing = flow(case)
        built, inputs = flowing.built, flowing.inputs
    module = built.module
    if not isinstance(module, nn.Module):
        case.does_not_apply("it is no torch module")
    run = case.caller(built, *inputs)
    if case.subject.router and case.subject.kind == "feed_forward":
        _as_the_router_says(case, built, inputs[0], run)
        return
    if not any(isinstance(m, nn.ModuleList) for m in module.modules()):
        case.does_not_apply("it holds no list of modules that may be experts")
    found = _of_several(module, run)
    if not found:
        case.does_not_apply("no mixture of experts of which a token takes several was recognised")
    odd, (_, at) = max(((m, misfit_of_ratios(m)) for m in found), key=lambda one: one[1][0])
    off = case.apply(largest_misfit, module, run)
    case.witness()
    case.require(
        off < LARGEST,
        f"in {odd.place or 'the model'} experts are not weighted by the router's scores of them",
        got=_shown(odd, at),
        expected=_wanted(odd, at),
        error=off,
        tolerance=LARGEST,
        cause=lambda: _words(odd),
        asks=("structure", "other"),
    )


def _as_the_router_says(case: Case, built: Built, x: Tensor, run: Caller) -> None:
    """Require that experts are mixed by the weights that the subject's `router` gives."""
    told = case.ask("router", x, built=built).detach().double().flatten(0, -2)
    found = [m for m in mixtures(built.module, run) if m.gates.shape == told.shape]
    if len(found) != 1:
        every_chosen_expert_has_a_part(case, built, x, run)
        return
    gates = case.apply(gates_of, built.module, run, len(told))
    factor = (gates * told).sum() / told.square().sum()  # what stands behind the experts has one, an activation say
    case.witness()
    case.close(
        gates,
        factor * told,
        "experts are not mixed by the weights that its router gives",
        bound=LARGEST,
        constants_allowed=True,
        cause=lambda: _fewer(found[0], told) or exchanged(gates, told * gates.sum() / told.sum()) or _words(found[0]),
    )


def _fewer(one: Mixture, told: Tensor) -> str | None:
    """Say that fewer experts have a part in a token than the router gives weights to, where that is seen."""
    mixed, given = one.gates != 0, told != 0
    if bool((mixed <= given).all()) and bool((mixed != given).any()):
        return overwritten(mixed, given)
    kept = (one.gates.sum(1) - told.sum(1)).abs() <= LARGEST
    if bool(kept.all()) and not bool((mixed <= given).all()):
        off = int((mixed != given).any(1).sum())
        return (
            f"{off} of {len(told)} tokens are given what other experts made, each place with the weight that is due "
            "there: what sorted rows gave is not put back in the inverse of the order that they were sorted in"
        )
    return None


def gates_of(module: nn.Module, run: Callable[[], object], tokens: int) -> Tensor:
    """Return `[N, E]`: by what the experts of the mixture over so many tokens are weighted in what comes out."""
    return next(m.gates for m in mixtures(module, run) if len(m.gates) == tokens)


def _of_several(module: nn.Module, run: Callable[[], object]) -> list[Mixture]:
    """Return the mixtures of a model in which some token takes several experts."""
    return [m for m in mixtures(module, run) if bool(((m.gates != 0) | m.lost).sum(1).gt(1).any())]


def largest_misfit(module: nn.Module, run: Callable[[], object]) -> Tensor:
    """Return how far, as a difference of logarithms, weights of experts are from going by the router's scores."""
    return torch.tensor([misfit_of_ratios(m)[0] for m in _of_several(module, run)]).max()


def _shown(one: Mixture, at: int) -> str:
    return "weights " + ", ".join(f"{float(w):.4g}" for w in one.gates[at] if w != 0)


def _wanted(one: Mixture, at: int) -> str:
    chosen = (one.gates[at] != 0) | one.lost[at]
    if bool(one.lost[at].any()):
        return f"weights of the {int(chosen.sum())} experts that are called on this token"
    right = one.scores[at][chosen].softmax(0) * float(one.gates[at].sum())
    return "weights " + ", ".join(f"{float(w):.4g}" for w in right)


def _words(one: Mixture) -> str | None:
    """Say what the weights are instead, where that is seen."""
    place, chosen = one.place or "the model", one.gates != 0
    if bool(one.lost.any()):
        return f"in {place} experts overwrite one another: of those that a token is given to some have no part in it"
    several = chosen.sum(1) > 1
    if not bool(several.any()):
        return None
    gates, scores = one.gates[several], one.scores[several]
    high = torch.where(chosen[several], gates, -torch.inf).amax(1)
    low = torch.where(chosen[several], gates, torch.inf).amin(1)
    if bool(((high - low).abs() <= 1e-9 * high).all()):
        largest = torch.where(chosen[several], scores.softmax(1), -torch.inf).amax(1)
        first = torch.where(chosen[several], scores, -torch.inf).softmax(1).amax(1)
        if any(bool(((high - one).abs() <= 1e-6 * high).all()) for one in (largest, first)):
            return f"all experts of a token in {place} are weighted by the weight of its first"
        return f"all experts of a token in {place} have the same weight, whatever their scores"
    turned = torch.where(chosen[several], scores, torch.inf).argmin(1)
    if bool((turned == torch.where(chosen[several], gates, -torch.inf).argmax(1)).all()):
        return f"in {place} the weights are given to other experts than those they were computed for"
    return None
