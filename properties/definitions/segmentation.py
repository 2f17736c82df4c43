"""Segmentation as it is defined: merges in order, longest pieces, all ways to cut a word.

This file imports torch alone: its source is pasted into standalone scripts.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def as_list(ids: Sequence[int]) -> list[int]:
    """Return ids as a list."""
    return list(ids)


def after(before: Sequence[int], ids: Sequence[int]) -> Sequence[int]:
    """Return ids that something else was encoded before."""
    return ids


def differ(one: object, other: object) -> Tensor:
    """Return whether two things are not equal."""
    return torch.tensor(one != other)


def is_without(ids: Sequence[int], unknown: int | None) -> Tensor:
    """Return whether the id of what is unknown is not among the ids."""
    return torch.tensor(unknown is None or unknown not in ids)


def times_more(wanted: int, ids: Sequence[int], others: Sequence[int]) -> int:
    """Return how much more often an id is among some ids than among others."""
    return list(ids).count(wanted) - list(others).count(wanted)


def as_text(symbol: Any) -> Any:
    """Return a symbol as text; bytes as one character each."""
    return symbol.decode("latin-1") if isinstance(symbol, bytes) else symbol


def listed(words: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Return words as lists of symbols."""
    return [[as_text(bytes([s]) if isinstance(s, int) else s) for s in word] for word in words]


def as_dict(table: Any) -> dict[str, Any]:
    """Return a table as a dict."""
    return {as_text(piece): value for piece, value in dict(table).items()}


def as_pairs(merges: Iterable[Sequence[Any]]) -> list[tuple[str, ...]]:
    """Return merges as tuples."""
    return [tuple(as_text(symbol) for symbol in pair) for pair in merges]


def merged_ids(
    words: list[list[str]], merges: Sequence[Sequence[str]], vocabulary: Mapping[str, int], unknown: int = -1
) -> list[int]:
    """Apply every merge, the first learnt first, wherever it fits: the definition, without a priority queue."""
    ids = []
    for symbols in words:
        for pair in merges:
            if len(symbols) > 1 and pair[0] in symbols:
                symbols = joined(symbols, tuple(pair))
        ids += [vocabulary.get(symbol, unknown) for symbol in symbols]
    return ids


def joined(symbols: list[str], pair: tuple[str, ...]) -> list[str]:
    """Return symbols with every occurrence of a pair made one, from the left."""
    found: list[str] = []
    at = 0
    while at < len(symbols):
        width = 2 if tuple(symbols[at : at + 2]) == pair else 1
        found.append("".join(symbols[at : at + width]))
        at += width
    return found


def rare_merge(words: list[list[str]], merges: Sequence[Sequence[str]]) -> tuple[Any, ...]:
    """Return the first merge that is of no most frequent pair: its number, the pair, its count, the most, one of them.

    Empty if there is none.
    """
    corpus = Counter(tuple(word) for word in words)
    for number, pair in enumerate(merges):
        counts: Counter[tuple[str, ...]] = Counter()
        for symbols, times in corpus.items():
            for neighbours in itertools.pairwise(symbols):
                counts[neighbours] += times
        most = max(counts.values(), default=0)
        if counts[tuple(pair)] != most:
            return number + 1, tuple(pair), counts[tuple(pair)], most, next(iter(counts.most_common(1)), ("none",))[0]
        merged: Counter[tuple[str, ...]] = Counter()
        for symbols, times in corpus.items():
            merged[tuple(joined(list(symbols), tuple(pair)))] += times
        corpus = merged
    return ()


def longest_pieces(words: list[list[str]], vocabulary: Mapping[str, int], unknown: int) -> list[int]:
    """Cut every word greedily: the longest piece that fits, again and again, or it is unknown.

    Symbols inside of a word may bear the mark of a continuation already.
    """
    plain = ["".join([*word[:1], *(symbol.removeprefix("##") for symbol in word[1:])]) for word in words]
    return [i for word in plain for i in _greedy(word, vocabulary, unknown)]


def _greedy(word: str, vocabulary: Mapping[str, int], unknown: int) -> list[int]:
    ids: list[int] = []
    start = 0
    while start < len(word):
        mark = "##" if start else ""
        fits = [end for end in range(start + 1, len(word) + 1) if mark + word[start:end] in vocabulary]
        if not fits:
            return [unknown]
        ids.append(vocabulary[mark + word[start : fits[-1]]])
        start = fits[-1]
    return ids


def probabilities(
    ids: Sequence[int], words: list[list[str]], vocabulary: Mapping[str, int], scores: Mapping[str, float]
) -> Tensor:
    """Return the log probabilities of a segmentation and of the best one, of all that there are."""
    names = {index: piece for piece, index in vocabulary.items()}
    given = sum(scores.get(names.get(i, ""), -math.inf) for i in ids)
    whole = "".join(symbol for word in words for symbol in word)
    best = max((sum(scores[p] for p in way) for way in _ways(whole, scores)), default=-math.inf)
    return torch.tensor([given, best], dtype=torch.float64)


def _ways(word: str, scores: Mapping[str, float]) -> Iterator[list[str]]:
    """Go through all segmentations of a word into known pieces."""
    if not word:
        yield []
    for end in range(1, len(word) + 1):
        if word[:end] in scores:
            for rest in _ways(word[end:], scores):
                yield [word[:end], *rest]
