"""The masking of masked language models: which tokens are chosen, and what becomes of them."""

from __future__ import annotations

import torch
from scipy import stats
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_fact
from veriformer.properties.engine.property import holds

FALSE_ALARM = 1e-9
"""Chance that a count of a right implementation falls outside its interval."""

ROWS, LENGTH = 128, 512
"""Tokens enough to tell 15 % from the 13.9 % of draws with replacement, by seven standard deviations."""


@holds(
    "masking.mlm",
    statement="15 % of the tokens are chosen; of them 80 % are masked, 10 % replaced at random, 10 % left; no special.",
    formula="chosen ~ Bin(n, 0.15); masked, replaced, left ~ chosen * (0.8, 0.1, 0.1); labels = tokens where chosen",
    source="Devlin et al. 2019, section 3.1.",
    kinds=("masking",),
    level="extended",
    unless=needs_fact("mask_id"),
    examples_factor=0.25,
    catches=("LS09", "LS10", "LS15"),
)
def masking_follows_bert(case: Case) -> None:
    """Counts over 65536 tokens within binomial intervals whose false-alarm rate is 1e-9 each. An implementation that
    chooses exactly 15 % varies less, and passes.
    """
    subject = case.subject
    config = case.config()
    vocabulary = max(config.vocab_size, int(subject.fact("mask_id")) + 1)
    specials = [*subject.fact("special_ids", ()), int(subject.fact("mask_id"))]
    ordinary = torch.tensor([i for i in range(vocabulary) if i not in specials])
    tokens = ordinary[torch.randint(len(ordinary), (ROWS, LENGTH), generator=case.generator)]
    places = torch.rand(tokens.shape, generator=case.generator) < 0.1
    if subject.fact("special_ids"):
        chosen_specials = torch.tensor(list(subject.fact("special_ids")))
        tokens[places] = chosen_specials[torch.randint(len(chosen_specials), tokens.shape, generator=case.generator)][
            places
        ]
    seed = case.integer("mask seed", 0, 9999)
    inputs, labels = _masked(case, tokens.clone(), seed)
    chosen = labels != int(subject.fact("ignore_index", -100))
    special = torch.isin(tokens, torch.tensor(specials))
    case.require(~(chosen & special).any(), "a special token is to be predicted",
                 got=f"{int((chosen & special).sum())} of them", expected="none")  # fmt: skip
    probability = float(subject.fact("mask_probability", 0.15))
    _count(case, "tokens chosen", chosen.sum(), int((~special).sum()), probability)
    case.exact(labels[chosen], tokens[chosen], "a label is not the token that stood there")
    case.exact(inputs[~chosen], tokens[~chosen], "a token that is not to be predicted was changed")
    total = int(chosen.sum())
    masked = inputs == int(subject.fact("mask_id"))
    changed = chosen & ~masked & (inputs != tokens)
    slack = 0.1 / vocabulary  # a random token may be the old one, or the mask, or neither is among those drawn from
    _count(case, "chosen tokens masked", (masked & chosen).sum(), total, 0.8 + slack / 2, slack / 2)
    _count(case, "chosen tokens replaced", changed.sum(), total, 0.1 - slack, slack)
    again, _ = _masked(case, tokens.clone(), seed + 1)
    case.require((again != inputs).any(), "another seed hides the same tokens", got="the same", expected="others")
    case.witness()


def _masked(case: Case, tokens: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    output = case.ask("forward", tokens, seed, built=case.built(dtype=torch.float32))
    if not (isinstance(output, tuple | list) and len(output) == 2 and all(isinstance(x, Tensor) for x in output)):
        raise SubjectError("forward did not return two tensors, inputs and labels, as a masking does")
    return output[0], output[1]


def _count(case: Case, what: str, count: Tensor, total: int, share: float, slack: float = 0.0) -> None:
    """Require a count to lie within its binomial interval, the share known up to `slack`."""
    low = float(stats.binom.ppf(FALSE_ALARM / 2, total, max(0.0, share - slack)))
    high = float(stats.binom.isf(FALSE_ALARM / 2, total, min(1.0, share + slack)))
    case.require(
        (low <= count) & (count <= high),
        f"the share of {what} is not {share:.3g}",
        got=f"{int(count)} of {total} ({int(count) / max(total, 1):.4f})",
        expected=f"{low:.0f} to {high:.0f}",
    )
