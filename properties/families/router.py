"""Mixtures of experts: how a router weighs those that it chose."""

from __future__ import annotations

from torch import Tensor

from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_fact, needs_part
from veriformer.properties.engine.property import holds


@holds(
    "router.normalised",
    statement="The weights of the chosen experts sum to one if and only if that is declared.",
    formula="sum_e w_e = 1 with norm_topk_prob; without it sum_e w_e = sum of chosen p_e < 1; w_e >= 0",
    source="Jiang et al. 2024 (Mixtral), section 2.1; documented bug ME03: norm_topk_prob was not applied.",
    kinds=("feed_forward", "layer", "encoder", "decoder", "encoder_decoder", "classifier"),
    unless=(needs_part("router"), needs_fact("norm_topk_prob")),
    catches=("ME03",),
)
def weights_of_experts_sum_as_declared(case: Case) -> None:
    """A softmax over all experts, of which k are kept, sums to less than one by what the others had; divided by its sum
    it does not. Where k is the number of experts both are one, and nothing can be told.
    """
    built, length = case.built(), case.length("T")
    x = case.normal(2, length, built.config.d_model, dtype=built.dtype)
    weights = case.ask("router", x, built=built).detach()
    case.equal(
        case.apply(_leading_sizes, weights), [2, length], "the router gives no row of weights for every token",
        got=f"a tensor of {list(weights.shape)}", expected="[B, T, E]",
    )  # fmt: skip
    case.finite(weights, "the weights of experts are NaN or infinite")
    case.require(
        (weights >= 0).all(), "an expert has a negative weight", got=f"{weights.min():.4g}", expected="0 or more"
    )
    total = weights.sum(-1)
    slack = 4 * weights.shape[-1] * max(epsilon(built.dtype), epsilon(weights.dtype))
    if case.subject.fact("norm_topk_prob"):
        case.require(
            ((total - 1).abs() <= slack).all(),
            "the weights of the chosen experts do not sum to one, which norm_topk_prob says",
            got=f"sums from {total.min():.4g} to {total.max():.4g}",
            expected="1",
            error=float((total - 1).abs().max()),
            tolerance=slack,
            cause=lambda: (
                "the probabilities of those that were not chosen are missing: they were not divided by their sum"
                if bool((total < 1 + slack).all())
                else "the weights are no probabilities"
            ),
        )
    else:
        if bool((weights > 0).all()):
            case.reject("every expert is chosen, so that the weights sum to one either way")
        case.require(
            (total < 1 - slack).any(),
            "the weights of the chosen experts sum to one, where norm_topk_prob is declared false",
            got=f"sums from {total.min():.4g} to {total.max():.4g}",
            expected="less than 1 by what the others had",
            cause=lambda: "they were divided by their sum",
        )
    case.witness()


def _leading_sizes(weights: Tensor) -> list[int]:
    return list(weights.shape[:2])
