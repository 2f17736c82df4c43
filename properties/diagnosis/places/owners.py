"""Tokens that attend with another sample than their own: found by replacing one token at a time under a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.diagnosis.places.batches import Batches, longest

_LENGTHS = (4, 6, 3, 5)
"""Of the samples: each another, in no order, so long that a token more or less leaves each its majority."""


def wrong_owners(batches: Batches) -> str | None:
    """Say which tokens are seen by other samples, or not by their own, where samples have different lengths."""
    if not batches.takes_mask or batches.case.subject.fact("batch_coupled") or longest(batches.case) < 7:
        return None
    length = 7
    mask = batches.masks(list(_LENGTHS), length).cpu()
    seen = _seen(batches, mask, length)
    if seen is None or seen != _seen(batches, mask, length):
        return None  # it depends on what the tokens are, as where they are routed and some are dropped
    count = len(_LENGTHS)
    tokens = [t for t in seen if any(seen[t][b] for b in range(count) if b != t[0])]
    if not tokens:
        return None
    causal = bool(batches.case.subject.fact("causal"))
    everyone = all(all(own) for own in seen.values())
    if everyone:
        ones = _seen(batches, torch.ones(count, length, dtype=torch.bool), length)
        apart = ones is not None and not any(own[b] for t, own in ones.items() for b in range(count) if b != t[0])
        if apart:
            return (
                "with samples of different lengths every token of one sample reaches every other sample, with a mask "
                "of ones none does: packed samples are not kept apart"
            )
        return None
    if all(own[b] == (b >= t[0]) for t, own in seen.items() for b in range(count)) and causal:
        return (
            "with samples of different lengths each sample sees the tokens of the samples before it in the batch: "
            "packed samples are not kept apart"
        )
    return _boundary(mask, seen, tokens) or _listed(mask, seen, tokens)


def _seen(batches: Batches, mask: Tensor, length: int) -> dict[tuple[int, int], list[bool]] | None:
    """Return for each real token (sample, number) which samples it attends with: most of whose tokens, beside itself.

    With the tokens that it reaches, or that reach it: a causal model lets no token reach those before it.
    """
    count = len(mask)
    x, other = batches.draw(count, length), batches.draw(count, length)
    given = mask.to(x.device)
    before = batches.together(x, given)
    tokens = mask.nonzero().tolist()
    reached = []
    for b, place in tokens:
        changed = x.clone()
        changed[b, place] = other[b, place] if not torch.equal(other[b, place], x[b, place]) else other[b, place - 1]
        if torch.equal(changed, x):
            return None
        moved = batches.rows_differ(batches.together(changed, given), before).cpu()
        reached.append(moved[mask] if batches.per_position else moved.flatten(1).any(1) if moved.ndim > 1 else moved)
    linked = torch.stack(reached)
    names = [(b, int(mask[b, :place].sum())) for b, place in tokens]
    if not batches.per_position:
        return dict(zip(names, linked.tolist(), strict=True))
    linked = linked | linked.T
    linked.fill_diagonal_(False)
    owner = torch.tensor([b for b, _ in tokens])
    found = {}
    for at, name in enumerate(names):
        shares = [
            int(linked[at, owner == b].sum()) / (int((owner == b).sum()) - int(name[0] == b)) for b in range(count)
        ]
        found[name] = [share > 0.5 for share in shares]
    return found


def _boundary(mask: Tensor, seen: dict[tuple[int, int], list[bool]], tokens: list[tuple[int, int]]) -> str | None:
    """Tell a boundary between packed samples that lies some tokens too late, or too early."""
    lengths = mask.sum(1).tolist()
    flat = [(b, n) for b, length in enumerate(lengths) for n in range(length)]
    for shift in (-2, -1, 1, 2):
        owners = [flat[min(max(at + shift, 0), len(flat) - 1)][0] for at in range(len(flat))]
        wrong = [token for token, owner in zip(flat, owners, strict=True) if owner != token[0]]
        if wrong != tokens:
            continue
        which = "first" if shift < 0 else "last"
        which = which if abs(shift) == 1 else f"{which} {abs(shift)} tokens"
        token = "token of" if abs(shift) == 1 else "of"
        by, far = ("before", "late") if shift < 0 else ("after", "early")
        among = "but the first" if shift < 0 else "but the last"
        own = any(seen[token][token[0]] for token in wrong if lengths[token[0]] > abs(shift) + 1)
        lost = "too" if own else "and not by its own"
        off = "one token" if abs(shift) == 1 else f"{abs(shift)} tokens"
        example = next(token for token in wrong if token[0] == (1 if shift < 0 else 0))
        other = example[0] + (-1 if shift < 0 else 1)
        return (
            f"with samples of {', '.join(map(str, lengths))} tokens in one batch, the {which} {token} every sample "
            f"{among} is seen by the sample {by} it {lost} (that of sample {example[0]} by sample {other}): where "
            f"samples are packed into one row, the boundary between them lies {off} too {far}"
        )
    return None


def _listed(mask: Tensor, seen: dict[tuple[int, int], list[bool]], tokens: list[tuple[int, int]]) -> str | None:
    lengths = mask.sum(1).tolist()
    if len(tokens) > sum(lengths) // 2:
        return None
    told = []
    for b in range(len(lengths)):
        numbers = [n for at, n in tokens if at == b]
        if not numbers or len({tuple(seen[b, n]) for n in numbers}) > 1:
            continue
        others = [str(m) for m, is_seen in enumerate(seen[b, numbers[0]]) if is_seen and m != b]
        own = "too" if seen[b, numbers[0]][b] else "and not by its own"
        which = f"token {numbers[0]}" if len(numbers) == 1 else f"tokens {numbers[0]} to {numbers[-1]}"
        is_are = "is" if len(numbers) == 1 else "are"
        told.append(f"{which} of sample {b} {is_are} seen by sample {' and '.join(others)} {own}")
    if not told:
        return None
    return f"with samples of {', '.join(map(str, lengths))} tokens in one batch, {'; '.join(told[:3])}"
