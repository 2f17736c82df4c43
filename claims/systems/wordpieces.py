"""Training of WordPiece: which pair is merged next, by likelihood and as the notes write the score."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable

Score = Callable[[int, float, float, float], float]
"""Of a pair: how often it occurs, its share among pairs, its parts' shares among symbols."""


def whole_corpus(times: int, joint: float, first: float, second: float) -> float:
    """Return n log(P(xy) / (P(x) P(y))): to first order what merging adds to the corpus's log likelihood.

    Source: Schuster & Nakajima 2012, section 3; Wu et al. 2016, section 4.1 (both take the pair that adds most).
    """
    return times * each(times, joint, first, second)


def each(times: int, joint: float, first: float, second: float) -> float:
    """Return log(P(xy) / (P(x) P(y))): what merging adds for one occurrence, the score that tutorials print."""
    return math.log(joint) - math.log(first) - math.log(second)


def notes(times: int, joint: float, first: float, second: float) -> float:
    """Return log P(xy) / (log P(x) + log P(y)), as lecture 08 has it."""
    return math.log(joint) / (math.log(first) + math.log(second))


SCORES = {"whole corpus": whole_corpus, "each": each, "notes": notes}
"""By what they look at."""


def merges(words: Iterable[str], number: int, score: Score) -> list[tuple[str, str]]:
    """Return the first pairs that are merged; of equal scores the one that comes first in the alphabet.

    Args:
        words: of the corpus.
        number: of merges.
        score: of a pair.
    """
    corpus, found = Counter(tuple(word) for word in words), []
    for _ in range(number):
        pairs, symbols = _counts(corpus)
        if not pairs:
            break
        all_pairs, all_symbols = sum(pairs.values()), sum(symbols.values())
        best = min(
            sorted(pairs),
            key=lambda p: (
                -score(pairs[p], pairs[p] / all_pairs, symbols[p[0]] / all_symbols, symbols[p[1]] / all_symbols)
            ),
        )
        found.append(best)
        corpus = Counter({_merged(word, best): times for word, times in corpus.items()})
    return found


def likelihood(words: Iterable[str], pair: tuple[str, str] | None = None) -> float:
    """Return the log likelihood of the corpus under a unigram model of its symbols, once `pair` is merged, nats."""
    corpus = Counter({_merged(tuple(word), pair) if pair else tuple(word): n for word, n in Counter(words).items()})
    symbols = _counts(corpus)[1]
    total = sum(symbols.values())
    return sum(times * math.log(times / total) for times in symbols.values())


def _counts(corpus: Counter[tuple[str, ...]]) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    pairs: Counter[tuple[str, str]] = Counter()
    symbols: Counter[str] = Counter()
    for word, times in corpus.items():
        for pair in itertools.pairwise(word):
            pairs[pair] += times
        for symbol in word:
            symbols[symbol] += times
    return pairs, symbols


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    result: list[str] = []
    for symbol in word:
        if result and (result[-1], symbol) == pair:
            result[-1] += symbol
        else:
            result.append(symbol)
    return tuple(result)
