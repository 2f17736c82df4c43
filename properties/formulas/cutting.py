"""Wrong ways to cut words into the pieces of a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Cut = Callable[[str, Mapping[str, int], int], list[int]]


def _kept(word: str, vocabulary: Mapping[str, int], unknown: int) -> list[int]:
    ids, start = list[int](), 0
    while start < len(word):
        fits = _fits(word, start, vocabulary)
        if not fits:
            return [*ids, unknown]
        ids.append(vocabulary[_marked(word, start, fits[-1])])
        start = fits[-1]
    return ids


def _skipped(word: str, vocabulary: Mapping[str, int], unknown: int) -> list[int]:
    ids, start = list[int](), 0
    while start < len(word):
        fits = _fits(word, start, vocabulary)
        ids.append(vocabulary[_marked(word, start, fits[-1])] if fits else unknown)
        start = fits[-1] if fits else start + 1
    return ids


def _left_out(word: str, vocabulary: Mapping[str, int], unknown: int) -> list[int]:
    ids = _kept(word, vocabulary, unknown)
    return ids[:-1] if ids[-1:] == [unknown] else ids


def _shortest(word: str, vocabulary: Mapping[str, int], unknown: int) -> list[int]:
    ids, start = list[int](), 0
    while start < len(word):
        fits = _fits(word, start, vocabulary)
        if not fits:
            return [unknown]
        ids.append(vocabulary[_marked(word, start, fits[0])])
        start = fits[0]
    return ids


def _marked(word: str, start: int, end: int) -> str:
    return ("##" if start else "") + word[start:end]


def _fits(word: str, start: int, vocabulary: Mapping[str, int]) -> list[int]:
    return [end for end in range(start + 1, len(word) + 1) if _marked(word, start, end) in vocabulary]


_SLIPS: tuple[tuple[str, Cut], ...] = (
    ("where no piece fits, the pieces found before stay and the unknown token stands behind them: the whole word is to "
     "be one unknown token", _kept),
    ("where no piece fits, one unknown token stands for a single character: the whole word is to be one", _skipped),
    ("where no piece fits, the rest of the word is dropped without a token", _left_out),
    ("the shortest piece that fits is taken, not the longest", _shortest),
)  # fmt: skip


def cut_cause(
    ids: list[int], words: Sequence[Sequence[str]], vocabulary: Mapping[str, int], unknown: int
) -> str | None:
    """Name the wrong way of cutting words that gives some ids.

    Args:
        ids: of the subject.
        words: lists of symbols.
        vocabulary: piece to id.
        unknown: id of what is not in the vocabulary.
    """
    plain = ["".join([*word[:1], *(symbol.removeprefix("##") for symbol in word[1:])]) for word in words]
    for told, cut in _SLIPS:
        if [i for word in plain for i in cut(word, vocabulary, unknown)] == ids:
            return told
    return None
