"""Why the labels of a masking are not the tokens that stood there; part of `masking.mlm`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from veriformer.properties.definitions.chance import most_hits

_NEARLY = 0.95
"""Of the labels: ends of rows have no neighbour."""

_CHANCE = 1e-9
"""That as many random words are the mask token itself as are taken for it."""


class Masked(NamedTuple):
    """What went into a masking and what came out of it.

    Attributes:
        tokens: int64 `[B, T]`, as they were.
        inputs: int64 `[B, T]`, some of them hidden.
        labels: int64 `[B, T]`.
        chosen: bool `[B, T]`, where there is a label.
        mask_id: of the mask token.
        ignored: label of what is not to be predicted.
    """

    tokens: Tensor
    inputs: Tensor
    labels: Tensor
    chosen: Tensor
    mask_id: int
    ignored: int


def label_cause(seen: Masked) -> str | None:
    """Say which numbers stand as labels in place of the tokens."""
    labels, inputs, tokens = (x[seen.chosen] for x in (seen.labels, seen.inputs, seen.tokens))
    if not len(labels):
        return None
    if bool((labels == labels[0]).all()) and len(tokens.unique()) > 1:
        mask = ", the mask token" if int(labels[0]) == seen.mask_id else ""
        return f"every label is {int(labels[0])}{mask}: the label is to be the token that stood there"
    if torch.equal(labels, inputs):
        return (
            "the labels are taken from the inputs after tokens were hidden: where the mask or a random word stands in, "
            "it is its own label"
        )
    return labels_are_moved(seen) or _copied_between(seen, labels, inputs, tokens) or _numbered_apart(labels, tokens)


def _copied_between(seen: Masked, labels: Tensor, inputs: Tensor, tokens: Tensor) -> str | None:
    """Say that labels are copied after one of the two ways to hide tokens, and before the other."""
    masked = inputs == seen.mask_id
    swapped = ~masked & (inputs != tokens)
    kept = ~masked & ~swapped
    strange = _by_chance(inputs[swapped])
    odd = labels[kept] != tokens[kept]  # masks that the word they stood for was put over later
    if not bool(swapped.any()) or int(odd.sum()) > strange or bool((labels[kept][odd] != seen.mask_id).any()):
        return None
    if not bool(odd.any()) and torch.equal(labels[swapped], inputs[swapped]):
        rest = labels[masked] != tokens[masked]
        if bool((labels[masked][rest] != seen.mask_id).any()) or int(rest.sum()) > strange:
            return None
        return (
            "the labels are taken from the tokens after random words were put in, and before masks are: where a random "
            "word stands in, it is its own label, and the word that stood there is lost"
        )
    rest = labels[masked] != seen.mask_id
    covered = labels[swapped] == seen.mask_id  # masks that a random word was put over later
    if not bool((~rest).any()) or int(rest.sum()) > strange:
        return None
    if not torch.equal(labels[masked][rest], tokens[masked][rest]):
        return None
    if not torch.equal(labels[swapped][~covered], tokens[swapped][~covered]):
        return None
    return (
        "the labels are taken from the tokens after masks were put in, and before random words are: where the mask "
        "stands in, it is its own label, and the word that stood there is lost"
    )


def _by_chance(words: Tensor) -> float:
    """Return how many masks may have been drawn beside so many random words, where they may be the mask."""
    return most_hits(_CHANCE, len(words), 1 / max(len(words.unique()), 2))


def _numbered_apart(labels: Tensor, tokens: Tensor) -> str | None:
    """Say that labels are the tokens in another numbering, moved by a number."""
    step = int(labels[0] - tokens[0])
    if not step or not bool((labels - tokens == step).all()):
        return None
    return f"every label is the token {'plus' if step > 0 else 'less'} {abs(step)}: the two are numbered differently"


def labels_are_moved(seen: Masked) -> str | None:
    """Say that labels are the tokens of neighbouring places or rows, and not those of their own place."""
    if not bool(seen.chosen.any()) or _share(seen, seen.tokens) >= _NEARLY:
        return None
    for step, axis, words in (
        (-1, 1, "the next token"),
        (1, 1, "the token before"),
        (-1, 0, "the token of the next row"),
        (1, 0, "the token of the row before"),
    ):
        if _share(seen, seen.tokens.roll(step, axis)) > _NEARLY:
            return f"the label is {words}: labels are moved by one against the inputs"
    return None


def _share(seen: Masked, tokens: Tensor) -> float:
    """Return the share of the labels that are these tokens."""
    return float((seen.labels == tokens)[seen.chosen].double().mean())


def other_places(seen: Masked) -> str | None:
    """Say that labels stand at all places, at those that were not chosen, or at a part of those that were."""
    if bool(seen.chosen.all()):
        return _none_is_ignored(seen)
    hidden, masked = seen.inputs != seen.tokens, seen.inputs == seen.mask_id
    if not torch.equal(seen.labels[seen.chosen], seen.tokens[seen.chosen]) or not bool(hidden.any()):
        return None
    share, out_of_sight = (float(x.double().mean()) for x in (seen.chosen, hidden & ~seen.chosen))
    if not bool((hidden & seen.chosen).any()):
        if min(share, float(hidden[~seen.chosen].double().mean())) > 0.5:
            return (
                "labels stand at the tokens that are not chosen: the number that is ignored is put where tokens are "
                "chosen, and not where they are not"
            )
        if 0 < share < 0.5 * out_of_sight:
            return (
                "labels stand at chosen tokens that are left as they are, and nowhere else: what is masked or replaced "
                "has none"
            )
        return None
    are_masks, has_masks = bool(masked[hidden & ~seen.chosen].all()), bool((masked & hidden & seen.chosen).any())
    if share < 0.5 * out_of_sight and are_masks and not has_masks:
        kept = bool((seen.chosen & ~hidden).any())
        return (
            f"labels stand at chosen tokens that are replaced{' or left as they are' if kept else ''}, and nowhere "
            "else: where the mask stands in there is none"
        )
    return None


def _none_is_ignored(seen: Masked) -> str | None:
    """Say that every place has a label: the token, or another number where there is to be none."""
    if torch.equal(seen.labels, seen.tokens):
        return f"every token has its label: nothing is set to {seen.ignored} where it is not chosen"
    values, counts = seen.labels.unique(return_counts=True)
    filler = int(values[counts.argmax()])
    own = seen.labels != filler
    hidden = (seen.inputs != seen.tokens) & (seen.tokens != filler)
    if 2 * int(counts.max()) < seen.labels.numel() or bool((hidden & ~own).any()):
        return None
    if not torch.equal(seen.labels[own], seen.tokens[own]):
        return None
    return f"labels of what is not chosen are {filler}, and not {seen.ignored}, which a loss ignores"
