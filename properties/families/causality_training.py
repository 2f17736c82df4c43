"""Causality, end to end: a language model trained on noise cannot beat the entropy of the noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.engine.calling import Caller
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_fact, needs_module
from veriformer.properties.engine.property import holds

_STEPS, _BATCH, _LENGTH = 40, 16, 6


@holds(
    "causality.random-tokens",
    statement="Trained for a few steps on independent uniform tokens, a causal model does not beat log V on new ones.",
    formula="E[-log p(x_t | x_<t)] >= log V for x_t uniform and independent",
    source="Shannon 1948: no predictor beats the entropy; a leak of the next token is learned within steps.",
    kinds=("decoder",),
    level="extended",
    requires=("numerics.stateless",),
    unless=(
        needs_fact("causal", True),
        needs_module,
        excludes_fact("prefix"),
        lambda s: None if s.takes_tokens else "it takes embeddings, not tokens",
    ),
    examples_factor=0.05,
    catches=("CM01", "CM19"),
)
def noise_cannot_be_predicted(case: Case) -> None:
    """The only detector here that knows nothing of masks: whatever lets the next token through, by any path, makes the
    loss fall. Judged on fresh tokens, n of them: the mean of n losses of a model without a leak is at least log V,
    and falls below it by more than 7 standard errors with probability 1e-12.
    """
    built = case.built(dtype=torch.float32, fresh=True)
    module = built.module
    if not isinstance(module, nn.Module) or not any(p.requires_grad for p in module.parameters()):
        case.reject("nothing to train")
    vocab = built.config.vocab_size
    length = case.fitting(_LENGTH + 1)
    batches, fresh = case.tokens(_STEPS, _BATCH, length), case.tokens(256, length)
    columns = case.call(built, fresh[:1]).shape[-1]
    if columns < vocab:  # more are usual: a vocabulary is padded, or holds tokens that are never drawn
        case.does_not_apply(f"its outputs are no logits over a vocabulary of {vocab}: they have {columns} columns")
    losses = case.apply(losses_after_training, case.caller(built), module, batches, fresh)
    mean, error = losses.mean(), losses.std() / len(losses) ** 0.5
    z = ((math.log(vocab) - mean) / error).clamp(min=0)
    case.bench.tally.note(float(z), 7.0)
    case.require(
        z <= 7.0,
        f"trained on random tokens, the loss is {mean:.3f}, below log V = {math.log(vocab):.3f}: a token leaks in",
        got=f"{mean:.4f}",
        expected=f"at least {math.log(vocab):.4f}",
        error=z,
        unit="standard errors of that mean",
        tolerance=7.0,
    )
    case.witness()


def losses_after_training(call: Caller, module: nn.Module, batches: Tensor, fresh: Tensor) -> Tensor:
    """Train on one batch after another, and return the loss of every token of a fresh one, float64.

    Args:
        call: gives logits `[B, T, V]` for tokens.
        module: that is trained.
        batches: `[N, B, T]`.
        fresh: `[B, T]`.
    """
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)

    def losses(tokens: Tensor) -> Tensor:
        logits = call(tokens)[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")

    for tokens in batches:
        optimiser.zero_grad()
        losses(tokens).mean().backward()
        optimiser.step()
    with torch.no_grad():
        return losses(fresh).double()
