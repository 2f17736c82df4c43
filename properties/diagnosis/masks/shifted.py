"""Which positions a mask hides in place of those that it should."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.diagnosis.masks.masked import Masked

_OTHERS = (7, 4)  # lengths of the other of two sequences


def instead_cause(masked: Masked) -> str | None:
    """Say what is hidden in place of what should be; of two sequences, whatever the length of the other one."""
    if masked.case.subject.fact("prefix"):
        return _inside_the_prefix(masked)
    told = _told(masked)
    kept = masked.kept
    if told is None or kept is None:
        return told
    try:
        for length in _OTHERS:
            masked.kept = kept[:, :length]
            if _told(masked) != told:
                return None
    finally:
        masked.kept = kept
    return told


def _told(masked: Masked) -> str | None:
    return _instead(masked) or _of_the_first_block(masked)


def _inside_the_prefix(masked: Masked) -> str | None:
    """Say that padding is seen inside a declared prefix and hidden behind it."""
    prefix, length = int(masked.case.subject.fact("prefix")), 6
    x, shown = masked.draw(1, length), False
    for real in range(1, length):
        seen = masked.is_seen(x, masked.padded(x, [real], "right"))
        if any(seen[max(real, prefix) :]):
            return None
        shown |= any(seen[real:prefix])
    return (
        "padding inside the prefix is seen, behind it none is: the prefix opens what the mask hides" if shown else None
    )


def _instead(masked: Masked) -> str | None:
    """Hide one position at a time: what is hidden in its place, by one rule for all places."""
    length = 6
    x = masked.draw(1, length)
    everything = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    open_ = masked.is_seen(x, everything)
    if not all(open_[1:-1]):
        return None
    if masked.side != "both":
        return _instead_at_the_end(masked, x) if masked.side == "right" else None
    gone: list[list[int]] = []
    for place in range(length):
        mask = everything.clone()
        mask[0, place] = False
        seen = masked.is_seen(x, mask)
        gone.append([s for s in range(length) if open_[s] and not seen[s]])
    places = range(length)
    reach = [s for s in places if open_[s]]

    def all_hide(of: dict[int, int]) -> bool:
        return all(gone[p] == [of[p]] for p in of if of[p] in reach) and any(of[p] in reach for p in of)

    for step in (1, -1):
        if all_hide({p: p + step for p in places if 0 <= p + step < length and p in reach}):
            front = ""
            if step < 0 and masked.case.subject.kind == "classifier":
                front = ", as where a token is put in front of the sequence and the mask is extended at its end"
            return (
                f"hiding position p hides position p {'+' if step > 0 else '-'} 1 instead, for every p: the mask is "
                f"shifted by one against the sequence{front}"
            )
    if len(reach) > 2 and all_hide({p: length - 1 - p for p in places}):
        return "hiding position p hides position T - 1 - p: the mask is applied in reversed order"
    if len(reach) > 2 and all(gone[p] == [s for s in reach if s != p] for p in reach):
        return "hiding one position hides all others and leaves that one visible: the mask is inverted"
    if all(gone[p] == [length - 1] for p in places):
        return (
            f"whichever position is hidden, the last of {length} is: only the number of real positions is read, as a "
            "length"
        )
    if all(not own for own in gone[:-1]) and gone[-1] == [length - 1]:
        return "hiding a position hides nothing but at the end: the mask is read for the last real position"
    return None


def _of_the_first_block(masked: Masked) -> str | None:
    """Say that positions are hidden by the first entries of a mask in each block of them, by the one size that fits.

    Asked with the first position hidden, and with the last one: the others follow where these do.
    """
    x = masked.draw(1)
    everything = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    open_, length = masked.is_seen(x, everything), x.shape[1]
    if masked.side != "both" or not all(open_):
        return None

    def hidden_by(place: int) -> list[int]:
        mask = everything.clone()
        mask[0, place] = False
        return [at for at, seen in enumerate(masked.is_seen(x, mask)) if not seen]

    if len(of_first := hidden_by(0)) < 2 or hidden_by(length - 1):
        return None
    size = of_first[1]
    if any(hidden_by(place) != list(range(place, length, size)) for place in range(size)):
        return None
    return (
        f"positions are taken in blocks of {size}, and each block is masked by the first {size} entries of the mask, "
        f"those of the first block: hiding position 0 hides {', '.join(map(str, of_first))} too, hiding the last hides "
        "nothing"
    )


def _instead_at_the_end(masked: Masked, x: Tensor) -> str | None:
    """As `_instead`, where padding stands on the right alone: shorten a sequence by one position after another.

    What is seen must be what would be seen if other positions were hidden, and not what is seen of those that are
    real: an output of a causal model does not see the last ones anyway.
    """
    length = x.shape[1]
    everything = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    if bool(masked.moved(masked(x, everything), masked(x)).any()):
        return None
    reaches = masked.sees(x, everything)
    rules = {"right": range(length), "shifted": range(-1, length - 1), "long": range(1, length + 1)}
    holding = set(rules)
    for real in range(2, length):
        seen = masked.is_seen(x, masked.padded(x, [real], "right"))
        for name, by in rules.items():
            hidden = range(by[real], length - 1 if name == "shifted" else length)
            if seen != _would_see(masked, reaches, hidden, real):
                holding.discard(name)
    if holding == {"shifted"}:
        return (
            "the last real position is hidden and the last padded one is seen, however many are padding: the mask is "
            "shifted by one against the sequence"
            + (
                ", as where a token is put in front of the sequence and the mask is extended at its end"
                if masked.case.subject.kind == "classifier"
                else ""
            )
        )
    if holding == {"long"}:
        return "the first padded position is seen, however many are padding, and no other: the mask is one too long"
    return None


def _would_see(masked: Masked, reaches: Tensor, hidden: range, real: int) -> list[bool]:
    """Return which positions would move an output elsewhere at a real position if some were hidden."""
    length = len(reaches)
    outputs = torch.arange(length) < (real if masked.per_position else length)
    elsewhere = torch.arange(length)
    found = []
    for s in range(length):
        counted = outputs & (elsewhere != s) if masked.per_position else outputs
        found.append(s not in hidden and bool((reaches[s] & counted).any()))
    return found
