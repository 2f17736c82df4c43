"""Three samples of three lengths, in every order: whose outputs each place gets, and whose mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import permutations

import torch
from torch import Tensor

from veriformer.properties.diagnosis.places.batches import Batches, longest

_LONGEST = 12
"""Beyond the usual tiles of small tests (4, 8)."""

Order = tuple[int, ...]
Rule = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Arrangements:
    """The same samples under masks of different lengths, in all orders.

    Attributes:
        batches: the subject.
        x: the samples.
        lengths: one choice for each order.
    """

    batches: Batches
    x: Tensor
    lengths: list[Order]
    _alone: dict[tuple[int, Order], Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Number of positions, padding included."""
        return self.x.shape[1]

    def masks(self) -> Iterator[tuple[Order, Tensor]]:
        """Yield the choices of lengths with their masks `[B, T]`."""
        for lengths in self.lengths:
            yield lengths, self.batches.masks(list(lengths), self.length)

    def alone(self, sample: int, mask: Tensor) -> Tensor:
        """Return the outputs of one sample by itself under a mask `[T]`."""
        key = sample, tuple(mask.long().tolist())
        if key not in self._alone:
            self._alone[key] = self.batches.together(self.x[sample : sample + 1], mask[None])[0]
        return self._alone[key]

    def is_that(self, got: Tensor, own: Tensor, sample: int, used: Tensor) -> bool:
        """Whether outputs are those of a sample alone under a mask, where that mask and their own leave tokens."""
        wanted = self.alone(sample, used)
        if not self.batches.per_position:
            return not self.batches.differs(got, wanted)
        rows = own & used
        return not bool(rows.any()) or not self.batches.differs(got[rows], wanted[rows])


def arranged(batches: Batches) -> Arrangements | None:
    """Return three samples, to be called under masks of three lengths in every order; None where none can be given."""
    length = min(_LONGEST, longest(batches.case))
    if not batches.takes_mask or length < 5:
        return None
    three = (2, (length - 1) // 2, length - 1)
    return Arrangements(batches, batches.draw(3, length), list(permutations(three)))


def samples_moved(batches: Batches) -> str | None:
    """Say by which order of their lengths samples, or their masks alone, come to stand in the place of others."""
    made = arranged(batches)
    if made is None:
        return None
    outputs = {lengths: (mask, batches.together(made.x, mask)) for lengths, mask in made.masks()}
    kinds: tuple[tuple[str, Callable[[int, int], tuple[int, int]]], ...] = (
        ("outputs", lambda i, j: (j, j)),
        ("padding mask", lambda i, j: (i, j)),
        ("tokens", lambda i, j: (j, i)),
    )
    for what, of in kinds:
        orders: dict[Order, Order] = {}
        for lengths, (mask, got) in outputs.items():
            fits = [
                order
                for order in permutations(range(3))
                if all(
                    made.is_that(got[i], mask[i], of(i, j)[0], mask[of(i, j)[1]]) for i, j in enumerate(order)
                )
            ]  # fmt: skip
            if len(fits) != 1:
                break
            orders[lengths] = fits[0]
        if len(orders) == len(outputs) and any(order != (0, 1, 2) for order in orders.values()):
            return _moved(what, orders)
    return None


def _moved(what: str, orders: dict[Order, Order]) -> str | None:
    if len(set(orders.values())) == 1:
        return None  # the same order whatever the lengths: it is no matter of masks
    lengths, order = next(one for one in orders.items() if one[1] != (0, 1, 2))
    place = next(i for i, j in enumerate(order) if i != j)
    told = (
        f"with samples of {', '.join(map(str, lengths[:-1]))} and {lengths[-1]} tokens sample {place} gets the {what} "
        f"of sample {order[place]}"
    )
    for first, sign in (("shortest", 1), ("longest", -1)):
        sorts = {own: tuple(sorted(range(3), key=[sign * n for n in own].__getitem__)) for own in orders}
        inverse = {own: tuple(s.index(b) for b in range(3)) for own, s in sorts.items()}
        twice = {own: tuple(s[b] for b in s) for own, s in sorts.items()}
        back = {own: tuple(s[b] for b in s) for own, s in inverse.items()}
        by = f"samples are sorted by length ({first} first)"
        for words, guess in (
            (
                f"{by} and put back by that order itself, not by its inverse (order.argsort()); where the order only "
                "swaps two samples, the two are the same",
                twice,
            ),
            (f"{by} and not put back", sorts),
            (f"{by}, and the inverse of that order is applied twice", back),
            (f"they stand in the inverse of the order by length ({first} first)", inverse),
        ):
            if orders == guess:
                return f"{told}: {words if what == 'outputs' else words.replace('samples are', f'each {what} is')}"
    return f"{told}: samples stand in another order, which depends on their lengths"


def mask_of_another(batches: Batches) -> str | None:
    """Name the rule by which a sample's mask is made of the masks of a batch, where it is not its own."""
    made = arranged(batches)
    if made is None:
        return None
    rounds = [batches.together(made.x, mask) for _, mask in made.masks()]
    masks = [mask for _, mask in made.masks()]
    if _follow(made, masks, rounds, lambda own, _: own):
        if batches.has_ends_alone():
            return None
        holes = torch.ones_like(masks[0])
        for b in range(len(holes)):
            holes[b, min(2 * b + 1, made.length - 1)] = False  # each at a place of its own
        masks, rounds = [holes], [batches.together(made.x, holes)]
        if _follow(made, masks, rounds, lambda own, _: own):
            return None
    for words, rule in _rules(batches):
        if _follow(made, masks, rounds, rule) and _explains(made, masks, rounds, rule):
            return words
    return None


def _follow(made: Arrangements, masks: list[Tensor], rounds: list[Tensor], rule: Rule) -> bool:
    """Whether in all rounds each sample gives what it gives alone under the mask that a rule makes of all."""
    for mask, got in zip(masks, rounds, strict=True):
        for b, own in enumerate(mask):
            used = rule(own, mask)
            if not bool(used.any()) or not made.is_that(got[b], own, b, used):
                return False
    return True


def _explains(made: Arrangements, masks: list[Tensor], rounds: list[Tensor], rule: Rule) -> bool:
    """Whether a rule that is followed tells of outputs that are wrong: some of those compared, or zeros beyond it."""
    cut = False
    for mask, got in zip(masks, rounds, strict=True):
        for b, own in enumerate(mask):
            wanted, used = made.alone(b, own), rule(own, mask)
            if not made.batches.per_position:
                if made.batches.differs(got[b], wanted):
                    return True
                continue
            wrong = made.batches.rows_differ(got[b], wanted) & own
            if bool((wrong & used).any()):
                return True
            if bool((wrong & ~used).any()):
                cut = bool((got[b][own & ~used] == 0).all())
                if not cut:
                    return False
    return cut


def _rules(batches: Batches) -> Iterator[tuple[str, Rule]]:
    what = "memory" if batches.side == "source" else "padding"
    length = "" if batches.per_position else " (its length, the place of its last token)"
    for at, which in ((0, "first"), (-1, "last")):
        yield f"the {what} mask of the {which} sample{length} is used for all samples", lambda _, m, at=at: m[at]  # type: ignore[misc]
        yield (
            f"all samples are cut at the length of the {which}: what the {what} mask of the {which} sample hides is "
            "hidden in all",
            lambda own, m, at=at: own & m[at],  # type: ignore[misc]
        )
        yield (
            f"what the {what} mask of the {which} sample leaves is seen in all samples, their padding too",
            lambda own, m, at=at: own | m[at],  # type: ignore[misc]
        )
    yield (
        f"the {what} is hidden only where all samples of the batch hide it: the longest length is used for all",
        lambda _, m: m.any(0),
    )
    yield (
        f"the {what} is hidden in all samples where one hides it: the shortest length is used for all",
        lambda _, m: m.all(0),
    )
    for by in (1, -1):
        yield (
            f"each sample gets the {what} mask of the sample {'before' if by == 1 else 'after'} it",
            lambda own, m, by=by: m.roll(by, 0)[_place(own, m)],  # type: ignore[misc]
        )
    yield f"the samples' {what} masks are used in reversed order", lambda own, m: m.flip(0)[_place(own, m)]
    for size in range(2, 9):
        for at, which in ((0, "first"), (-1, "last")):
            yield (
                f"all samples are cut behind the last tile of {size} positions that has a token of the {which} sample: "
                f"whether a tile is skipped as padding is read off the mask of the {which} sample alone, so that "
                "longer samples lose their ends",
                lambda own, m, at=at, size=size: own & _tiles(m[at], size),  # type: ignore[misc]
            )
        yield (
            f"all samples are cut behind the last tile of {size} positions that is padding in no sample: a tile is "
            "skipped where one sample has nothing in it",
            lambda own, m, size=size: own & torch.stack([_tiles(row, size) for row in m]).all(0),  # type: ignore[misc]
        )


def _place(own: Tensor, masks: Tensor) -> int:
    return next(b for b, mask in enumerate(masks) if torch.equal(mask, own))


def _tiles(mask: Tensor, size: int) -> Tensor:
    """Return which positions lie in a tile with something in it."""
    return torch.cat([part.any().expand(len(part)) for part in mask.split(size)])
