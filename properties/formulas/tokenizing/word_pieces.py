"""Wrong ways to cut words into WordPieces: candidates that are never tried, other marks, other ends of dead ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from veriformer.properties.definitions.segmentation import longest_pieces

_MARK = "##"

_ENOUGH = 3
"""Texts that are cut otherwise than right, and just so by the rule that is to be named."""

_OF_A_LENGTH = 6
"""Pieces of one length that texts are made of."""

_PAIRS = 150
"""Words of two pieces, about."""

_SHOWN = 3

_DEAD_END = "qqzzq"
"""What few vocabularies have pieces for."""

Table = Mapping[str, int]
Candidates = Callable[[str, int], Iterator[tuple[int, tuple[str, ...]]]]
Stopped = Callable[[str, int, list[int], Table, int], tuple[list[int], int]]


class Text(NamedTuple):
    """A text as it is split, and as it was encoded.

    Attributes:
        words: without marks.
        ids: that the subject gave.
    """

    words: list[str]
    ids: list[int]


Rule = Callable[[list[str], Table, int], list[int]]


def cut_cause(
    encode: Callable[[str], list[int]],
    words: Callable[[str], Sequence[Sequence[str]]],
    vocabulary: Table,
    unknown: int,
    *,
    first: str,
    is_plain: Callable[[str], bool],
) -> str | None:
    """Name the wrong way of cutting words that gives the ids of many texts.

    Args:
        encode: gives the ids of a text.
        words: gives the words of a text, each a list of symbols.
        vocabulary: piece to id.
        unknown: id of what is not in the vocabulary.
        first: a text that is looked at before others.
        is_plain: whether texts may be made of a piece, its mark taken off.

    Returns:
        The rule that gives the ids of all texts, those that right rules do not give among them; None if none does.
    """
    pieces = [piece for piece in vocabulary if is_plain(piece.removeprefix(_MARK))]
    seen = []
    for text in dict.fromkeys([first, *_texts(pieces)]):
        plain = ["".join([*w[:1], *(symbol.removeprefix(_MARK) for symbol in w[1:])]) for w in words(text)]
        seen.append(Text(plain, encode(text)))
    wrong = [one for one in seen if one.ids != _right(one.words, vocabulary, unknown)]
    if len(wrong) < _ENOUGH:
        return None

    def fits(rule: Rule) -> bool:
        # texts that are wrong first: most rules fail at one of the first
        return all(rule(one.words, vocabulary, unknown) == one.ids for one in chain(wrong, seen))

    if slips := [name for name, rule in _SLIPS if fits(rule)]:
        return "; or else, these words being cut alike: ".join(slips[:2])
    further = (_limit_cause(fits, vocabulary, pieces), _left_out_cause(fits, vocabulary, pieces))
    return "; or else, these words being cut alike: ".join(told for told in further if told) or None


def _texts(pieces: Sequence[str]) -> Iterator[str]:
    """Yield words of one piece and of several, with dead ends behind some, and texts of two words."""
    starts, inner = list[str](), list[str]()
    for chosen, own in ((starts, False), (inner, True)):
        sort = [piece.removeprefix(_MARK) for piece in pieces if piece.startswith(_MARK) is own]
        for length in sorted({len(piece) for piece in sort}):
            same = sorted(piece for piece in sort if len(piece) == length)
            chosen += same[:: max(1, len(same) // _OF_A_LENGTH)][: 2 * _OF_A_LENGTH]
    if not starts:
        return
    chosen = [*starts, *inner]
    yield from starts
    beside = [one + other for one in starts for other in chosen]
    yield from beside[:: max(1, len(beside) // _PAIRS)]
    for number, piece in enumerate(chosen[::4]):
        other = starts[(3 * number + 2) % len(starts)]
        yield starts[number % len(starts)] + _DEAD_END[: number % 3 + 2] + piece
        yield f"{piece}{_DEAD_END} {other}"
        yield f"{other} {piece}{_DEAD_END}"
    for number, piece in enumerate(inner):
        yield starts[number % len(starts)] + piece + inner[(7 * number + 2) % len(inner)]
        yield starts[(2 * number + 1) % len(starts)] + inner[(3 * number + 1) % len(inner)] + piece
        yield f"{starts[0]} {starts[(3 * number) % len(starts)]}{piece}"


def _right(words: list[str], vocabulary: Table, unknown: int) -> list[int]:
    return longest_pieces([list(word) for word in words], vocabulary, unknown)


def _ends(word: str, start: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the ends of candidates, the longest first, each with what is looked up."""
    mark = _MARK if start else ""
    yield from ((end, (mark + word[start:end],)) for end in range(len(word), start, -1))


def _within(first: range, inner: range) -> Candidates:
    """Return candidates of so many letters alone."""

    def candidates(word: str, start: int) -> Iterator[tuple[int, tuple[str, ...]]]:
        lengths = inner if start else first
        yield from (found for found in _ends(word, start) if found[0] - start in lengths)

    return candidates


def _looked_up(marked: Callable[[str, int], tuple[str, ...]]) -> Candidates:
    """Return candidates that are looked up otherwise, by letters and where they begin."""

    def candidates(word: str, start: int) -> Iterator[tuple[int, tuple[str, ...]]]:
        yield from ((end, marked(word[start:end], start)) for end in range(len(word), start, -1))

    return candidates


def _shortest(word: str, start: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    yield from reversed([*_ends(word, start)])


def _plain_later(word: str, start: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield candidates with the mark, and when none fits those without."""
    yield from _ends(word, start)
    if start:
        yield from ((end, (word[start:end],)) for end in range(len(word), start, -1))


def _is_unknown(word: str, start: int, ids: list[int], vocabulary: Table, unknown: int) -> tuple[list[int], int]:
    return [unknown], len(word)


def _kept(word: str, start: int, ids: list[int], vocabulary: Table, unknown: int) -> tuple[list[int], int]:
    return [*ids, unknown], len(word)


def _skipped(word: str, start: int, ids: list[int], vocabulary: Table, unknown: int) -> tuple[list[int], int]:
    return [*ids, unknown], start + 1


def _passed_over(word: str, start: int, ids: list[int], vocabulary: Table, unknown: int) -> tuple[list[int], int]:
    return ids, start + 1


def _left_out(word: str, start: int, ids: list[int], vocabulary: Table, unknown: int) -> tuple[list[int], int]:
    return ids, len(word)


def _forgotten(word: str, start: int, ids: list[int], vocabulary: Table, unknown: int) -> tuple[list[int], int]:
    return [], len(word)


def _rest_unknown(word: str, start: int, ids: list[int], vocabulary: Table, unknown: int) -> tuple[list[int], int]:
    return [*ids, *[unknown] * (len(word) - start)], len(word)


def _all_unknown(word: str, start: int, ids: list[int], vocabulary: Table, unknown: int) -> tuple[list[int], int]:
    return [unknown] * len(word), len(word)


def _rest_in_letters(word: str, start: int, ids: list[int], vocabulary: Table, unknown: int) -> tuple[list[int], int]:
    return [*ids, *(vocabulary.get(letter, unknown) for letter in word[start:])], len(word)


def _all_in_letters(word: str, start: int, ids: list[int], vocabulary: Table, unknown: int) -> tuple[list[int], int]:
    names = [_MARK + letter if at else letter for at, letter in enumerate(word)]
    return [vocabulary.get(name, unknown) for name in names], len(word)


def _cut(candidates: Candidates = _ends, stopped: Stopped = _is_unknown) -> Rule:
    """Return the rule that takes the first candidate there is, again and again, and ends otherwise where none is."""

    def of_word(word: str, vocabulary: Table, unknown: int) -> list[int]:
        ids, start = list[int](), 0
        while start < len(word):
            fits = ((end, name) for end, names in candidates(word, start) for name in names if name in vocabulary)
            end, name = next(fits, (0, ""))
            if end:
                ids, start = [*ids, vocabulary[name]], end
            else:
                ids, start = stopped(word, start, ids, vocabulary, unknown)
        return ids

    return lambda words, vocabulary, unknown: [i for word in words for i in of_word(word, vocabulary, unknown)]


def _from_the_end(words: list[str], vocabulary: Table, unknown: int) -> list[int]:
    def of_word(word: str) -> list[int]:
        ids, end = list[int](), len(word)
        while end:
            names = ((start, (_MARK if start else "") + word[start:end]) for start in range(end))
            start, name = next(((at, name) for at, name in names if name in vocabulary), (end, ""))
            if start == end:
                return [unknown]
            ids, end = [vocabulary[name], *ids], start
        return ids

    return [i for word in words for i in of_word(word)]


def _turned_back(words: list[str], vocabulary: Table, unknown: int) -> list[int]:
    def of_rest(word: str, start: int, dead: set[int]) -> list[int] | None:
        if start == len(word):
            return []
        for end, names in () if start in dead else _ends(word, start):
            rest = of_rest(word, end, dead) if names[0] in vocabulary else None
            if rest is not None:
                return [vocabulary[names[0]], *rest]
        dead.add(start)
        return None

    found = [of_rest(word, 0, set()) for word in words]
    return [i for ids in found for i in ([unknown] if ids is None else ids)]


def _fewest(words: list[str], vocabulary: Table, unknown: int) -> list[int]:
    def of_word(word: str) -> list[int]:
        best: list[list[int] | None] = [[]]
        for end in range(1, len(word) + 1):
            names = [((_MARK if start else "") + word[start:end], best[start]) for start in range(end)]
            ways = [[*way, vocabulary[name]] for name, way in names if way is not None and name in vocabulary]
            best.append(min(ways, key=len, default=None))
        return [unknown] if best[-1] is None else best[-1]

    return [i for word in words for i in of_word(word)]


def _up_to_the_unknown(words: list[str], vocabulary: Table, unknown: int) -> list[int]:
    ids = list[int]()
    for word in words:
        own = _right([word], vocabulary, unknown)
        ids += own
        if own == [unknown]:
            break
    return ids


def _one_for_all(words: list[str], vocabulary: Table, unknown: int) -> list[int]:
    ids = [_right([word], vocabulary, unknown) for word in words]
    return [unknown] if [unknown] in ids else [i for own in ids for i in own]


def _as_continued(words: list[str], vocabulary: Table, unknown: int) -> list[int]:
    always = _cut(_looked_up(lambda letters, start: (_MARK + letters,)))
    return _right(words[:1], vocabulary, unknown) + always(words[1:], vocabulary, unknown)


def _without_id_zero(words: list[str], vocabulary: Table, unknown: int) -> list[int]:
    return _right(words, {piece: index for piece, index in vocabulary.items() if index}, unknown)


_ONE = "the whole word is to be one unknown token"
_SLIPS: tuple[tuple[str, Rule], ...] = (
    ("where no piece fits, the pieces found before stay and the unknown token stands behind them: the whole word is to "
     "be one unknown token", _cut(stopped=_kept)),
    ("where no piece fits, one unknown token stands for a single character: the whole word is to be one",
     _cut(stopped=_skipped)),
    ("where no piece fits, the rest of the word is dropped without a token", _cut(stopped=_left_out)),
    (f"where no piece fits, a character is passed over without a token: {_ONE}", _cut(stopped=_passed_over)),
    (f"where no piece fits, the whole word is dropped without a token: {_ONE}", _cut(stopped=_forgotten)),
    (f"where no piece fits, the pieces found before stay and each character behind them is an unknown token: {_ONE}",
     _cut(stopped=_rest_unknown)),
    (f"where no piece fits, each character of the word is an unknown token: {_ONE}", _cut(stopped=_all_unknown)),
    (f"where no piece fits, the rest of the word is given in single characters: {_ONE}",
     _cut(stopped=_rest_in_letters)),
    (f"where no piece fits, the whole word is given in single characters: {_ONE}", _cut(stopped=_all_in_letters)),
    ("where the longest piece leads to a dead end, a shorter one is tried: the rule is greedy, and "
     f"{_ONE}", _turned_back),
    ("the shortest piece that fits is taken, not the longest", _cut(_shortest)),
    ("words are cut from the end: the longest piece that ends there, again and again", _from_the_end),
    ("words are cut into the fewest pieces, not greedily into the longest from the left", _fewest),
    (f"pieces inside of a word are looked up without the mark {_MARK}",
     _cut(_looked_up(lambda letters, start: (letters,)))),
    (f"pieces at the beginning of a word are looked up with the mark {_MARK} too, as if they continued one",
     _cut(_looked_up(lambda letters, start: (_MARK + letters,)))),
    (f"pieces inside of a word are looked up with the mark {_MARK} and, at each length, without it too",
     _cut(_looked_up(lambda letters, start: (_MARK + letters, letters) if start else (letters,)))),
    (f"pieces at the beginning of a word are looked up without the mark {_MARK} and, at each length, with it too",
     _cut(_looked_up(lambda letters, start: (_MARK + letters,) if start else (letters, _MARK + letters)))),
    (f"inside of a word, where no piece with the mark {_MARK} fits, those without it are tried: {_ONE}",
     _cut(_plain_later)),
    ("all words of a text but the first are cut as if they continued one: where a word begins, pieces are to be looked "
     f"up without the mark {_MARK}", _as_continued),
    ("an unknown word ends the text: the words behind it are dropped", _up_to_the_unknown),
    ("an unknown word makes the whole text one unknown token", _one_for_all),
    ("the piece whose id is 0 is never found, as where a number that is looked up is taken for true or false",
     _without_id_zero),
)  # fmt: skip


def _limit_cause(fits: Callable[[Rule], bool], vocabulary: Table, pieces: Sequence[str]) -> str | None:
    """Say that candidates of more, or fewer, letters than so many are never tried."""
    most = max((_letters(piece) for piece in pieces), default=0)
    every = range(1, most + 1)
    for where, sorts in (("", (False, True)), (" inside of a word", (True,)), (" where a word begins", (False,))):

        def lengths(some: range, sorts: tuple[bool, ...] = sorts) -> Rule:
            return _cut(_within(*(some if inner in sorts else every for inner in (False, True))))

        if known := [n for n in range(1, most) if fits(lengths(range(1, n + 1)))]:
            return _of_at_most(known, vocabulary, pieces, sorts)
        if fits(lengths(range(2, most + 1))):
            return f"pieces of a single letter are never tried{where}: candidates end at two letters"
    return None


def _letters(piece: str) -> int:
    return len(piece.removeprefix(_MARK))


def _of_at_most(known: Sequence[int], vocabulary: Table, pieces: Sequence[str], sorts: Sequence[bool]) -> str:
    """Say what is never tried, and what numbers come to a limit that explains all texts."""
    left = sorted((p for p in pieces if _letters(p) > known[-1] and p.startswith(_MARK) in sorts), key=len)
    inside = {piece.startswith(_MARK) for piece in left}
    where = "" if len(inside) > 1 else " inside of a word" if True in inside else " where a word begins"
    shown = ", ".join(map(repr, left[:_SHOWN])) + (" ..." if len(left) > _SHOWN else "")
    told = f"candidates of {known[-1] + 1} letters and more are never tried{where} ({shown})"
    named = [f"{length}, {words}" for words, length in _known_lengths(vocabulary, pieces) if length in known]
    if not named:
        return told
    return f"{told}: {'the limit is' if len(known) == 1 else 'as where the limit is'} {'; or '.join(named)}"


def _known_lengths(vocabulary: Table, pieces: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield in words what the limit of candidates may be taken from, with the number that it comes to."""
    first = max((_letters(p) for p in pieces if not p.startswith(_MARK)), default=0)
    inner = max((_letters(p) for p in pieces if p.startswith(_MARK)), default=0)
    any_first = max((piece for piece in vocabulary if not piece.startswith(_MARK)), key=len, default="")
    longer = f"where {_MARK} pieces are longer"
    if first < inner:
        yield f"the length of the longest piece that begins a word, {longer}", first
        if len(any_first) > first:
            yield f"the length of {any_first!r}, the longest piece without the mark {_MARK}, {longer}", len(any_first)
    if inner < first:
        longer = "where pieces that begin a word are longer"
        yield f"the length of the longest {_MARK} piece without its mark, {longer}", inner
    yield "one less than the longest piece has, as where a range ends before its last number", max(first, inner) - 1
    mark = f"less the mark {_MARK}, which is counted in a candidate and not in that length"
    yield f"the length of the longest piece that begins a word, {mark}", first - len(_MARK)
    if inner > first:
        yield f"the length of the longest {_MARK} piece without its mark, {mark}", inner - len(_MARK)


def _left_out_cause(fits: Callable[[Rule], bool], vocabulary: Table, pieces: Sequence[str]) -> str | None:
    """Say which sort of pieces is never found."""
    marked = {piece for piece in pieces if piece.startswith(_MARK)}
    last = max(vocabulary, key=lambda piece: vocabulary[piece])
    for what, left_out in (
        (f"pieces with the mark {_MARK} are", marked),
        ("pieces without a mark are", {*pieces} - marked),
        ("the piece of the last id is", {last}),
    ):
        if fits(_without(left_out)):
            shown = ", ".join(map(repr, sorted(left_out)[:_SHOWN])) + (" ..." if len(left_out) > _SHOWN else "")
            return f"{what} never found ({shown}): words are cut as they are to be without"
    return None


def _without(left_out: set[str]) -> Rule:
    def rule(words: list[str], vocabulary: Table, unknown: int) -> list[int]:
        return _right(words, {p: i for p, i in vocabulary.items() if p not in left_out}, unknown)

    return rule
