"""Wrong ways to learn the merges of byte-pair encoding, and to apply them: stale counts, and another order."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from veriformer.properties.definitions.segmentation import joined

Ranks = Mapping[tuple[str, ...], int]
Rule = Callable[[list[str], Ranks], list[str]]

_ENOUGH = 2
"""Words that are cut otherwise than right, and just so by the rule that is to be named."""

_WORDS = 150


def merges_cause(
    encode: Callable[[str], list[int]],
    words: Callable[[str], list[list[str]]],
    vocabulary: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    unknown: int,
) -> str | None:
    """Name the order in which merges are applied, where it is another one.

    Args:
        encode: gives the ids of a text.
        words: gives the words of a text, each a list of symbols.
        vocabulary: piece to id.
        merges: pairs of pieces, the first learnt first.
        unknown: id of what is not in the vocabulary.
    """
    ranks = {tuple(pair): rank for rank, pair in reversed([*enumerate(merges)])}
    seen = [(found[0], encode(text)) for text in _texts(merges) if len(found := words(text)) == 1]

    def fits(rule: Rule, symbols: list[str], ids: list[int]) -> bool:
        return [vocabulary.get(piece, unknown) for piece in rule(symbols, ranks)] == ids

    wrong = [one for one in seen if not fits(_first_learnt, *one)]
    if len(wrong) < _ENOUGH:
        return None
    told = [name for name, rule in _RULES if all(fits(rule, *one) for one in seen)]
    if told:
        return "; or else, these words being cut alike: ".join(told[:2])
    names = {index: piece for piece, index in vocabulary.items()}
    given = {names.get(i) for _, ids in seen for i in ids}
    lost = [{*_first_learnt(symbols, ranks)} - given for symbols, _ in wrong]
    if not all(lost):
        return None
    shown = ", ".join(repr(piece) for piece in sorted(set.union(*lost))[:4])
    return f"words are cut where the merges make one piece: {shown} are never given"


def _texts(merges: Sequence[Sequence[str]]) -> list[str]:
    """Return words in which one of two merges must come before the other."""
    known = [tuple(pair) for pair in merges]
    rivals = [x + y + z for x, y in known for other, z in known if other == y]
    repeated = [x * times for x, y in known if x == y for times in (3, 4, 5)]
    joined = ["".join(pair) for pair in known]
    beside = [one + other for one, other in zip(joined, [*joined[3:], *joined[:3]], strict=True)]
    parts, chance = sorted({piece for pair in known for piece in (*pair, "".join(pair))}), random.Random(0)
    mixed = ["".join(chance.choices(parts, k=chance.randint(2, 5))) for _ in range(_WORDS)] if parts else []
    every = dict.fromkeys([*rivals, *repeated, *joined, *beside, *mixed])
    plain = [word for word in every if word.isascii() and word.isalpha()]
    return plain[:: max(1, len(plain) // (2 * _WORDS))]


def _applied(choose: Callable[[list[tuple[int, int, int]]], tuple[int, int, int]]) -> Rule:
    """Return a rule that joins one pair after another: of (rank, place, length) of all that may be, the chosen one."""

    def rule(symbols: list[str], ranks: Ranks) -> list[str]:
        while True:
            pairs = itertools.pairwise(symbols)
            known = [(ranks[pair], at, len("".join(pair))) for at, pair in enumerate(pairs) if pair in ranks]
            if not known:
                return symbols
            at = choose(known)[1]
            symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]

    return rule


_first_learnt = _applied(lambda known: min(known))
"""What is right: of all pairs the one that was learnt first, and of its places the first."""


def _once(symbols: list[str], ranks: Ranks) -> list[str]:
    for pair in sorted(ranks, key=lambda p: ranks[p]):
        at = next((i for i, two in enumerate(itertools.pairwise(symbols)) if two == pair), None)
        if at is not None:
            symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]
    return symbols


def _at_once(symbols: list[str], ranks: Ranks) -> list[str]:
    read = list[str]()
    for symbol in symbols:
        read.append(symbol)
        while len(read) > 1 and (read[-2], read[-1]) in ranks:
            read[-2:] = [read[-2] + read[-1]]
    return read


def _longest_pieces(symbols: list[str], ranks: Ranks) -> list[str]:
    pieces, found, at = {"".join(pair) for pair in ranks}, list[str](), 0
    while at < len(symbols):
        ends = [end for end in range(at + 2, len(symbols) + 1) if "".join(symbols[at:end]) in pieces]
        end = max(ends, default=at + 1)
        found.append("".join(symbols[at:end]))
        at = end
    return found


def looked_at(beside: Sequence[int]) -> Rule:
    """Return a rule that takes pairs off a queue, and puts there what a merge makes with these neighbours alone."""

    def rule(symbols: list[str], ranks: Ranks) -> list[str]:
        row: list[str | None] = list(symbols)
        queue = [(ranks[pair], at, *pair) for at, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]
        while queue:
            first = min(queue)
            queue.remove(first)
            _, at, left, right = first
            behind = next((n for n in range(at + 1, len(row)) if row[n] is not None), None)
            if behind is None or (row[at], row[behind]) != (left, right):
                continue  # one of the two was merged since
            row[at], row[behind] = left + right, None
            places = [n for n, symbol in enumerate(row) if symbol is not None]
            here = places.index(at)
            for begin in (here + step for step in beside):
                if 0 <= begin < len(places) - 1:
                    one, other = row[places[begin]], row[places[begin + 1]]
                    if one and other and (one, other) in ranks:
                        queue.append((ranks[one, other], places[begin], one, other))
        return [symbol for symbol in row if symbol is not None]

    return rule


def by_old_ranks(symbols: list[str], ranks: Ranks, *, as_it_was: bool = False) -> list[str]:
    """Join what stands at the place of the entry with the least rank, whatever pair that was put there for.

    Args:
        symbols: of a word.
        ranks: of the merges.
        as_it_was: the piece of that pair is put there, though another pair is there by then.
    """
    pairs = {rank: pair for pair, rank in ranks.items()}
    row: list[str | None] = list(symbols)
    queue = [(ranks[pair], at) for at, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]
    while queue:
        queue.remove(first := min(queue))
        places = [n for n, symbol in enumerate(row) if symbol is not None]
        at = first[1]
        if row[at] is None or at == places[-1]:
            continue
        behind = places[places.index(at) + 1]
        now = pairs[first[0]] if as_it_was else (str(row[at]), str(row[behind]))
        if now not in ranks:
            continue
        row[at], row[behind] = "".join(now), None
        places.remove(behind)
        for begin in (places.index(at) - 1, places.index(at)):
            if 0 <= begin < len(places) - 1:
                pair = (str(row[places[begin]]), str(row[places[begin + 1]]))
                if pair in ranks:
                    queue.append((ranks[pair], places[begin]))
    return [symbol for symbol in row if symbol is not None]


_RULES: Iterable[tuple[str, Rule]] = (
    ("the leftmost pair that has a merge is joined first, not the one that was learnt first",
     _applied(lambda known: min(known, key=lambda one: one[1]))),
    ("a word is read from the left and what can be joined is joined at once, whatever was learnt first", _at_once),
    ("the rightmost pair that has a merge is joined first, not the one that was learnt first",
     _applied(lambda known: max(known, key=lambda one: one[1]))),
    ("the pair that was learnt last is joined first: ranks are compared the wrong way round",
     _applied(lambda known: max(known, key=lambda one: (one[0], -one[1])))),
    ("the pair that gives the longest piece is joined first, not the one that was learnt first",
     _applied(lambda known: max(known, key=lambda one: (one[2], -one[1])))),
    ("of equal pairs in a row the last is joined first, not the first",
     _applied(lambda known: min(known, key=lambda one: (one[0], -one[1])))),
    ("each merge joins one place of a word alone, others of the same pair are left", _once),
    ("after a merge only the pair with the right neighbour is looked at: that with the left one is never joined",
     looked_at((0,))),
    ("after a merge only the pair with the left neighbour is looked at: that with the right one is never joined",
     looked_at((-1,))),
    ("a pair that a merge makes with its neighbours is never joined: pairs are listed once", looked_at(())),
    ("what comes off the queue is not compared with the pair that stands there now: where a merge has changed it, "
     "another pair is joined at the rank of the old one, before merges learnt earlier", by_old_ranks),
    ("what comes off the queue of merges is not compared with the pair that stands there now: the piece of the old "
     "pair is put there, and the rest of the longer piece that its neighbour has become is lost",
     functools.partial(by_old_ranks, as_it_was=True)),
    ("words are cut greedily into the longest pieces: merges are not applied at all", _longest_pieces),
    ("no merge is applied: words stay cut into their symbols", lambda symbols, _: symbols),
)  # fmt: skip


Pair = tuple[str, ...]
Update = Callable[["Counter[Pair]", list[Pair], list[Pair], Pair, int], None]
"""Changes the counts by a word's pairs before and after a merge, the merged pair, and how often the word occurs."""


def _taken_once(counts: Counter[Pair], before: list[Pair], after: list[Pair], pair: Pair, times: int) -> None:
    counts.subtract(before)
    counts.update({p: n * times for p, n in Counter(after).items()})


def _added_once(counts: Counter[Pair], before: list[Pair], after: list[Pair], pair: Pair, times: int) -> None:
    counts.subtract({p: n * times for p, n in Counter(before).items()})
    counts.update(after)


def _added_once_where_new(counts: Counter[Pair], before: list[Pair], after: list[Pair], pair: Pair, times: int) -> None:
    lost, new = Counter(before) - Counter(after), Counter(after) - Counter(before)
    counts.subtract({p: n * times for p, n in lost.items()})
    counts.update(new)


def _lost_once(counts: Counter[Pair], before: list[Pair], after: list[Pair], pair: Pair, times: int) -> None:
    lost, new = Counter(before) - Counter(after), Counter(after) - Counter(before)
    counts.subtract(lost)
    counts.update({p: n * times for p, n in new.items()})


def _never_taken(counts: Counter[Pair], before: list[Pair], after: list[Pair], pair: Pair, times: int) -> None:
    new = Counter(after) - Counter(before)
    counts.update({p: n * times for p, n in new.items()})


def _added_all_anew(counts: Counter[Pair], before: list[Pair], after: list[Pair], pair: Pair, times: int) -> None:
    counts.update({p: n * times for p, n in Counter(after).items()})


def _never_changed(counts: Counter[Pair], before: list[Pair], after: list[Pair], pair: Pair, times: int) -> None:
    return


def _right(counts: Counter[Pair], before: list[Pair], after: list[Pair], pair: Pair, times: int) -> None:
    counts.subtract({p: n * times for p, n in Counter(before).items()})
    counts.update({p: n * times for p, n in Counter(after).items()})


_TAKEN = "a merge takes the old pairs of a word off the counts once, not as often as the word occurs"
_ADDED = "a merge adds the new pairs of a word to the counts once, not as often as the word occurs"
_UPDATES: tuple[tuple[str, Update], ...] = (
    (_TAKEN, _taken_once),
    (_TAKEN, _lost_once),
    (_ADDED, _added_once),
    (_ADDED, _added_once_where_new),
    ("the pairs that a merge takes apart, those with its neighbours, are not taken off the counts", _never_taken),
    ("the pairs of a word are added to the counts anew by each merge, and never taken off", _added_all_anew),
    ("the counts of pairs are those before the first merge: none changes them", _never_changed),
)


def counts_cause(learnt: Iterable[tuple[list[list[str]], Sequence[Sequence[str]]]]) -> str | None:
    """Name the wrong counts of which every merge is of a most frequent pair, where they are those of one rule.

    It must be so of most texts: what is merged again, or counted where it is no more, is kept in several ways.

    Args:
        learnt: for several texts their words, each a list of symbols, and the merges learnt of it, the first first.
    """
    seen = list(learnt)
    fits: Counter[str] = Counter()
    for name, update in _UPDATES:
        fits[name] = max(fits[name], sum(_explains(*one, update) for one in seen))
    (best, most), (_, second) = fits.most_common(2)
    each_once = [([[*word] for word in {tuple(word): None for word in words}], merges) for words, merges in seen]
    once = sum(_explains(*one, _right) for one in each_once)
    if 2 * once > len(seen) and once > most:
        return "pairs are counted once for every distinct word, not as often as the word occurs"
    return f"counts go stale: {best}" if 2 * most > len(seen) and second < most else None


def _explains(words: list[list[str]], merges: Sequence[Sequence[str]], update: Update) -> bool:
    corpus = Counter(tuple(word) for word in words)
    counts: Counter[Pair] = Counter()
    for symbols, times in corpus.items():
        for neighbours in itertools.pairwise(symbols):
            counts[neighbours] += times
    for one in merges:
        pair = tuple(one)
        if counts[pair] != max(counts.values(), default=0):
            return False
        merged: Counter[tuple[str, ...]] = Counter()
        for symbols, times in corpus.items():
            pieces = joined(list(symbols), pair)
            merged[tuple(pieces)] += times
            if len(pieces) < len(symbols):
                update(counts, [*itertools.pairwise(symbols)], [*itertools.pairwise(pieces)], pair, times)
        del counts[pair]
        corpus = merged
    return True
