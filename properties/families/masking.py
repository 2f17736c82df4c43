"""The masking of masked language models: which tokens are chosen, and what becomes of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.definitions.chance import least_hits, most_hits
from veriformer.properties.engine.case import Case, Cause
from veriformer.properties.engine.premises import needs_fact
from veriformer.properties.engine.property import holds
from veriformer.properties.families.masking_labels import Masked, label_cause, labels_are_moved, other_places
from veriformer.properties.subject.subject import Subject

FALSE_ALARM = 1e-9
"""Chance that a count of a right implementation falls outside its interval."""

ROWS, LENGTH = 128, 512
"""Tokens enough to tell 15 % from the 13.9 % of draws with replacement, by seven standard deviations."""
_ALIKE = (
    "the same places are hidden in every sample: they are drawn once for a batch, or anew from one seed for each sample"
)
_APART = 1_000_003
"""Between the seeds of what is masked and of the masking: of one seed both would draw the same numbers."""


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
    chooses exactly 15 % varies less, and passes. Each sample is drawn for itself. Where a seed chooses the same tokens
    again it gives the same inputs: all is drawn from it, or nothing.
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
    seed += _APART
    given = tokens.clone()
    memory = given.detach()  # what is returned may be the tensor itself
    inputs, labels = _masked(case, given, seed)
    case.require(
        (memory == tokens).all(), "the tokens that it is given are changed", got="altered entries",
        expected="the data as they were",
        cause=lambda: "the tokens are masked in place, in the caller's own tensor: a later epoch masks masked ones",
    )  # fmt: skip
    ignored = int(subject.fact("ignore_index", -100))
    chosen = labels != ignored
    special = torch.isin(tokens, torch.tensor(specials))
    seen = Masked(tokens, inputs, labels, chosen, int(subject.fact("mask_id")), ignored)
    case.require(~(chosen & special).any(), "a special token is to be predicted",
                 cause=lambda: (labels_are_moved(seen) or other_places(seen)
                                or _specials_chosen(chosen, special, inputs == seen.mask_id)),
                 got=f"{int((chosen & special).sum())} of them", expected="none")  # fmt: skip
    probability = float(subject.fact("mask_probability", 0.15))
    _count(case, "tokens chosen", chosen.sum(), int((~special).sum()), probability,
           cause=lambda: (_same_places(chosen, special) or _where_labels_stand(chosen, inputs, tokens, subject)
                          or other_places(seen) or _share_chosen(chosen, special, probability)))  # fmt: skip
    case.exact(labels[chosen], tokens[chosen], "a label is not the token that stood there",
               cause=lambda: label_cause(seen))  # fmt: skip
    case.exact(inputs[~chosen], tokens[~chosen], "a token that is not to be predicted was changed",
               cause=lambda: _changed(inputs, tokens, chosen, special))  # fmt: skip
    total = int(chosen.sum())
    masked = inputs == int(subject.fact("mask_id"))
    changed = chosen & ~masked & (inputs != tokens)
    slack = 0.1 / vocabulary  # a random token may be the old one, or the mask, or neither is among those drawn from
    shares = (float((masked & chosen).sum()) / max(total, 1), float(changed.sum()) / max(total, 1))
    _count(case, "chosen tokens masked", (masked & chosen).sum(), total, 0.8 + slack / 2, slack / 2,
           cause=lambda: _fates(shares, total, len(ordinary)))  # fmt: skip
    _count(case, "chosen tokens replaced", changed.sum(), total, 0.1 - slack, slack,
           cause=lambda: _fates(shares, total, len(ordinary)))  # fmt: skip
    _ids_are_those_of_the_vocabulary(case, inputs[changed], tokens, seed)
    _any_may_stand_in(case, inputs[changed], ordinary, specials)
    _words_are_drawn_apart(case, inputs, changed, len(ordinary))
    _rows_are_drawn_apart(case, chosen, special, probability)
    same, same_labels = _masked(case, tokens.clone(), seed)
    if torch.equal(same_labels, labels):  # else it takes no seed: nothing of it comes again
        moved = same != inputs
        case.require(
            ~moved.any(),
            "the same seed chooses the same tokens and gives other inputs",
            got=f"{int(moved.sum())} entries differ",
            expected="the same inputs",
            cause=lambda: _unseeded(moved, inputs == seen.mask_id),
        )
    again, _ = _masked(case, tokens.clone(), seed + 1)
    case.require((again != inputs).any(), "another seed hides the same tokens", got="the same", expected="others")
    case.witness()


def _ids_are_those_of_the_vocabulary(case: Case, drawn: Tensor, tokens: Tensor, seed: int) -> None:
    """Require that the largest id that stands in for others does not go with the length of a sequence."""
    length = tokens.shape[1]
    if not len(drawn) or not 0.9 * length < int(drawn.max()) < length:
        return
    first = drawn.max()
    cut = tokens[:, : length // 2]
    inputs, labels = _masked(case, cut.clone(), seed)
    masked = inputs == int(case.subject.fact("mask_id"))
    changed = (labels != int(case.subject.fact("ignore_index", -100))) & ~masked & (inputs != cut)
    largest = torch.where(changed, inputs, 0).max()
    case.require(
        (largest >= length // 2) | (first < 0.9 * length),  # of hundreds of ids below `length` the half are larger
        f"ids up to {int(first)} stand in for others in sequences of {length} tokens, up to {int(largest)} in "
        f"sequences of {length // 2}",
        got=f"{int(first)} and {int(largest)} as largest ids",
        expected="those of one vocabulary",
        cause=lambda: "random ids are drawn below the length of the sequence, not below the size of the vocabulary",
    )


def _any_may_stand_in(case: Case, drawn: Tensor, ordinary: Tensor, specials: list[int]) -> None:
    """Require that every ordinary token stands in for others: of 25 that are due none is there in one run of e^25."""
    known = len(ordinary) + len(specials)
    if len(drawn) < 25 * known or bool((drawn >= known).any()):  # ids beyond: it has a vocabulary of its own
        return
    missing = ordinary[~torch.isin(ordinary, drawn)].tolist()
    shown = ", ".join(map(str, missing[:5])) + (" ..." if len(missing) > 5 else "")
    last = ordinary[len(ordinary) - len(missing) :].tolist()
    of_special = sorted(set(specials) & set(drawn.tolist()))
    case.equal(
        missing,
        [],
        f"{len(missing)} of {len(ordinary)} ordinary tokens never stand in for another one",
        got=f"never {shown} among {len(drawn)} replacements",
        expected="each of them, as often as any other",
        cause=lambda: (
            _few_words(drawn, len(ordinary))
            or (
                f"the last {len(missing)} ids are never drawn"
                + (f", and special ones ({', '.join(map(str, of_special))}) are" if of_special else "")
                + ": a number is drawn below the count of ordinary ids and taken for an id itself"
                if missing == last
                else None
            )
        ),
    )


def _few_words(drawn: Tensor, ordinary: int) -> str | None:
    """Say that what should be any word is nearly always the same one, or one of a few side by side."""
    words, counts = drawn.unique(return_counts=True)
    if 2 * len(words) > ordinary:
        return None
    often = ", ".join(map(str, words[counts.argsort(descending=True)][:5].tolist()))
    which = f"the ids {often} alone are" if len(words) > 1 else f"the id {often} alone is"
    return (
        f"{which} drawn, of {ordinary}: what they are drawn from has but a part of its range (a draw "
        "that was decided by already, say)"
    )


def _words_are_drawn_apart(case: Case, inputs: Tensor, changed: Tensor, size: int) -> None:
    """Require that what stands in at one place of a row says nothing of the next one: the same in one of V pairs."""
    same = case.apply(alike_neighbours, inputs, changed)
    pairs = int((changed.sum(1) - 1).clamp(min=0).sum())
    most = most_hits(FALSE_ALARM / 2, pairs, 1 / max(size - 1, 1))
    case.require(
        same <= most,
        "neighbours among the random words of a row are the same too often",
        got=f"{int(same)} of {pairs} pairs",
        expected=f"{most:.0f} at most",
        cause=lambda: "one random word is drawn for a row, and stands in at all of its places",
    )


def alike_neighbours(inputs: Tensor, changed: Tensor) -> Tensor:
    """Return how many neighbours among the changed tokens of a row are the same."""
    words = [row[at] for row, at in zip(inputs, changed, strict=True)]
    return torch.stack([(w[1:] == w[:-1]).sum() for w in words]).sum()


def _rows_are_drawn_apart(case: Case, chosen: Tensor, special: Tensor, probability: float) -> None:
    """Require that one sample's choice says nothing of the next one's: both are chosen in p^2 of the places."""
    ordinary = ~special[::2] & ~special[1::2]
    both = chosen[::2] & chosen[1::2] & ordinary
    shared = float(both.sum()) > 0.9 * probability * float(ordinary.sum())
    _count(
        case, "places chosen in two samples at once", both.sum(), int(ordinary.sum()), probability**2,
        slack=0.1 * probability**2,  # of the share itself, which is known up to its own interval
        cause=lambda: _ALIKE if shared else None,
    )  # fmt: skip


def _same_places(chosen: Tensor, special: Tensor) -> str | None:
    """Say that every sample has the same places chosen, where nothing but special tokens makes a difference."""
    ordinary = ~special[::2] & ~special[1::2]
    if not bool(chosen.any()) or bool((chosen[::2] ^ chosen[1::2])[ordinary].any()):
        return None
    return _ALIKE


def _unseeded(moved: Tensor, masked: Tensor) -> str:
    """Say what is not drawn from the seed: which words stand in, or what becomes of a chosen token."""
    what = "what becomes of a chosen token is" if bool((moved & masked).any()) else "the words that stand in are"
    return f"{what} not drawn from the seed, as the places are: they come from a generator that is shared"


def _masked(case: Case, tokens: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    output = case.ask("forward", tokens, seed, built=case.built(dtype=torch.float32))
    if not (isinstance(output, tuple | list) and len(output) == 2 and all(isinstance(x, Tensor) for x in output)):
        raise SubjectError("forward did not return two tensors, inputs and labels, as a masking does")
    return output[0], output[1]


def _count(case: Case, what: str, count: Tensor, total: int, share: float, slack: float = 0.0,
           cause: Cause | None = None) -> None:  # fmt: skip
    """Require a count to lie within its binomial interval, the share known up to `slack`."""
    low = least_hits(FALSE_ALARM / 2, total, max(0.0, share - slack))
    high = most_hits(FALSE_ALARM / 2, total, min(1.0, share + slack))
    case.require(
        (low <= count) & (count <= high),
        f"the share of {what} is not {share:.3g}",
        got=f"{int(count)} of {total} ({int(count) / max(total, 1):.4f})",
        expected=f"{low:.0f} to {high:.0f}",
        cause=cause,
    )


def _changed(inputs: Tensor, tokens: Tensor, chosen: Tensor, special: Tensor) -> str:
    """Say which tokens are changed though they have no label: special ones, or any."""
    hidden = (inputs != tokens) & ~chosen
    share = [float((hidden & kind).sum()) / max(int(kind.sum()), 1) for kind in (special, ~special & ~chosen)]
    if share[1] == 0:
        return (
            "special tokens are kept out of the labels alone, not out of the choice: in the inputs "
            f"{share[0]:.1%} of them are changed"
        )
    if share[0] == 0:
        return f"{share[1]:.1%} of the ordinary tokens without a label are changed, and no special ones"
    return f"{share[1]:.1%} of the ordinary and {share[0]:.1%} of the special tokens are changed without a label"


def _specials_chosen(chosen: Tensor, special: Tensor, masked: Tensor) -> str:
    if torch.equal(chosen, masked):
        return (
            "labels stand where the input is the mask token, and nowhere else: tokens that are replaced or left as "
            "they are have none, and masks that were there before have one"
        )
    share = [float((chosen & kind).sum()) / max(int(kind.sum()), 1) for kind in (special, ~special)]
    if abs(share[0] - share[1]) < 0.02:
        return f"special tokens are chosen like any other: {share[0]:.1%} of them, {share[1]:.1%} of the ordinary ones"
    return f"{share[0]:.1%} of the special tokens are chosen, and {share[1]:.1%} of the ordinary ones"


def _where_labels_stand(chosen: Tensor, inputs: Tensor, tokens: Tensor, subject: Subject) -> str | None:
    """Say that labels are told by what became of the input, not by what was chosen."""
    if torch.equal(chosen, inputs != tokens):
        return (
            "labels stand where the input is another token than before, and nowhere else: what is chosen and left as "
            "it is has none"
        )
    if torch.equal(chosen, inputs == int(subject.fact("mask_id"))):
        return "labels stand where the input is the mask token, and nowhere else: what is replaced or left has none"
    return None


def _share_chosen(chosen: Tensor, special: Tensor, probability: float) -> str | None:
    """Name the slips that give known shares."""
    count = max(int((~special).sum()), 1)
    share = float(chosen.sum()) / count
    among_all = float((~special).double().mean())
    known = (
        ("positions are drawn with replacement, so that some are drawn twice", 1 - math.exp(-probability)),
        ("the others are chosen: the comparison is turned round", 1 - probability),
        ("the tokens that become the mask alone have a label", 0.8 * probability),
        ("the tokens that are changed alone have a label", 0.9 * probability),
        ("all tokens have a label", 1.0),
        ("the share is taken of all tokens, special ones too", probability / among_all),
        ("no token has a label", 0.0),
    )
    near = [words for words, p in known if abs(share - p) <= 4 * math.sqrt(p * (1 - min(p, 1)) / count) + 1e-9]
    return f"{share:.2%} of the ordinary tokens are chosen: {near[0]}" if len(near) == 1 else None


def _fates(shares: tuple[float, float], total: int, words: int) -> str:
    """Name the slip whose shares are nearest to those of so many chosen tokens, where chance explains the rest.

    A token that is drawn from so many words is the one that stood there once in as many.
    """
    masked, replaced = shares
    kept = 1 - masked - replaced
    told = f"of the chosen tokens {masked:.1%} are masked, {replaced:.1%} replaced and {kept:.1%} left"

    def off(guess: tuple[float, float]) -> float:
        return max(
            abs(share - p) / (0.012 + 3 * math.sqrt(p * (1 - p) / max(total, 1)))
            for share, p in zip(shares, (guess[0], guess[1] * (1 - 1 / max(words, 2))), strict=True)
        )

    slip, guess = min(_SLIPS, key=lambda slip: off(slip[1]))
    return f"{told}: {slip}" if off(guess) < 1 else told


_ONE_DRAW = (
    "as where the number that chooses a token decides what becomes of it too: one draw for both, or two of one seed"
)
_SLIPS = (
    ("1 in 10 of those that are not masked is replaced, where 1 in 2 must be", (0.8, 0.02)),
    (f"all are masked, {_ONE_DRAW}", (1.0, 0.0)),
    (f"none is masked, {_ONE_DRAW}", (0.0, 1 / 3)),
    (f"none is masked, {_ONE_DRAW}", (0.0, 2 / 3)),
    ("none is left as it is", (0.8, 0.2)),
    ("none is replaced", (0.8, 0.0)),
    ("masks are overwritten by random tokens", (0.72, 0.18)),
    ("masked and left are exchanged", (0.1, 0.1)),
    ("half of the masks are overwritten: the second draw is made among all", (0.4, 0.5)),
)
"""Shares masked and replaced that known slips give."""
