"""Wrong segmentations of words: by other rules than the most probable or without some pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

_OF_A_LENGTH = 10
_LONGEST = 24
"""Letters of a word that is looked at."""

_ENOUGH = 3
"""Words that are cut otherwise than right, and just so by the rule that is to be named."""

Scores = Mapping[str, float]
Fits = Callable[[str, list[str], Scores], bool]


def best_way(word: str, scores: Scores) -> tuple[float, list[str]]:
    """Return the log probability of the most probable segmentation of a word, and its pieces; -inf if there is none."""
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(word) + 1):
        ways = [
            (best[start][0] + scores[piece], [*best[start][1], piece])
            for start in range(end)
            if (piece := word[start:end]) in scores
        ]
        best.append(max(ways, default=(-math.inf, list[str]())))
    return best[-1]


def pieces_cause(
    encode: Callable[[str], list[int]],
    words: Callable[[str], list[list[str]]],
    vocabulary: Mapping[str, int],
    scores: Scores,
) -> str | None:
    """Name the rule by which words are cut, or the pieces that are never used.

    Args:
        encode: gives the ids of a text.
        words: gives the words of a text, each a list of symbols.
        vocabulary: piece to id.
        scores: piece to log probability.
    """
    names = {index: piece for piece, index in vocabulary.items()}
    seen = dict[str, list[str]]()
    for text in _texts(scores):
        found = words(text)
        word = "".join(found[0]) if len(found) == 1 else ""
        if 0 < len(word) <= _LONGEST and word not in seen and best_way(word, scores)[1]:
            seen[word] = [names.get(i, "?") for i in encode(text)]
    wrong = [word for word, got in seen.items() if not _is_best(word, got, scores)]
    if len(wrong) < _ENOUGH:
        return None
    if told := [rule for rule, fits in _RULES if all(fits(word, got, scores) for word, got in seen.items())]:
        return "; or else, these words being cut alike: ".join(told)
    for what, left_out in _sorts(scores):
        kept = {piece: score for piece, score in scores.items() if piece not in left_out}
        judged = [word for word in seen if best_way(word, kept)[1]]
        if len(set(judged) & set(wrong)) >= _ENOUGH and all(_is_best(word, seen[word], kept) for word in judged):
            shown = ", ".join(repr(piece) for piece in sorted(left_out)[:3]) + (" ..." if len(left_out) > 3 else "")
            return f"{what} are never used ({shown}): words are cut as well as can be without them"
    single = [word for word in seen if best_way(word, scores)[1] == [word]]
    cut = [word for word in single if word in wrong]
    if not cut:
        return None
    shown = ", ".join(f"{word!r} into {seen[word]}" for word in cut[:2])
    return f"of {len(single)} words that are best as one piece each, {len(cut)} are cut all the same: {shown}"


def _is_best(word: str, got: list[str], scores: Scores) -> bool:
    if "".join(got) != word or not set(got) <= set(scores):
        return False
    worth = best_way(word, scores)[0]
    return sum(scores[piece] for piece in got) >= worth - 1e-6 * max(1.0, abs(worth))


def _texts(scores: Mapping[str, float]) -> Iterator[str]:
    """Yield pieces of every length as texts, by themselves, behind a blank, and beside another one."""
    chosen = list[str]()
    for length in sorted({len(piece) for piece in scores}):
        same = sorted(piece for piece in scores if len(piece) == length and (piece[1:] or piece).isalpha())
        chosen += same[:: max(1, len(same) // _OF_A_LENGTH)]
    plain = [piece if piece.isalpha() else piece[1:] for piece in chosen]
    for text in plain:
        yield text
        yield f" {text}"
    for number, text in enumerate(plain):
        yield text + plain[(3 * number + 1) % len(plain)]
    for piece in chosen[-2:]:  # of the greatest length there may be one alone, and that behind a blank
        text = piece if piece.isalpha() else f" {piece[1:]}"
        for other in plain[:: max(1, len(plain) // _OF_A_LENGTH)]:
            yield text + other


def _sorts(scores: Scores) -> Iterator[tuple[str, set[str]]]:
    """Yield sorts of pieces in words, each with those that it is."""
    lengths = sorted({len(piece) for piece in scores})
    for least in reversed(lengths[1:]):
        greatest = f"pieces of the greatest length, {least} symbols,"
        yield (
            greatest if least == lengths[-1] else f"pieces of {least} symbols and more",
            {piece for piece in scores if len(piece) >= least},
        )
    for length in lengths:
        what = "pieces of one symbol" if length == 1 else f"pieces of {length} symbols"
        yield what, {piece for piece in scores if len(piece) == length}
    marked = {piece for piece in scores if piece[1:] and not piece[0].isalpha()}
    yield "pieces that begin with the mark of a word", marked
    yield "pieces that begin with no mark of a word", {piece for piece in scores if piece[1:]} - marked


def _greedy(word: str, got: list[str], scores: Scores) -> bool:
    start = 0
    for piece in got:
        fits = [end for end in range(start + 1, len(word) + 1) if word[start:end] in scores]
        if not fits or piece != word[start : fits[-1]]:
            return False
        start = fits[-1]
    return start == len(word)


def _from_the_end(word: str, got: list[str], scores: Scores) -> bool:
    return _greedy(
        word[::-1], [piece[::-1] for piece in reversed(got)], {p[::-1]: score for p, score in scores.items()}
    )


def _rescored(change: Callable[[float], float]) -> Fits:
    def fits(word: str, got: list[str], scores: Scores) -> bool:
        return _is_best(word, got, {piece: change(score) for piece, score in scores.items()})

    return fits


_RULES: Iterable[tuple[str, Fits]] = (
    ("words are cut greedily: the longest piece that fits, from the left, again and again", _greedy),
    ("words are cut greedily from the right: the longest piece that ends there, again and again", _from_the_end),
    ("words are cut into the fewest pieces, whatever their probabilities", _rescored(lambda score: -1.0)),
    ("the least probable segmentation is returned: the sign of the scores is turned", _rescored(lambda score: -score)),
    ("probabilities are added, not their logarithms", _rescored(math.exp)),
)
