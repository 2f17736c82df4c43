"""Three tokenizers written to be read: byte-level byte pairs, WordPiece, and the unigram language model."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

Pair = tuple[str, str]
_WORDS = re.compile(r" ?\S+|\s+(?!\S)|\s+")
_BASIC_WORDS = re.compile(r"\w+|[^\w\s]")


def _byte_alphabet() -> dict[int, str]:
    """Return one visible letter a byte (GPT-2's table): printable bytes stand for themselves, the rest from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


LETTER_OF = _byte_alphabet()
BYTE_OF = {letter: byte for byte, letter in LETTER_OF.items()}


def split_words(text: str) -> list[str]:
    """Split text before the spaces between words; nothing is lost: the parts joined are the text."""
    return _WORDS.findall(text)


def merge(symbols: Sequence[str], pair: Pair, joined: str) -> list[str]:
    """Return the symbols with every occurrence of `pair`, left to right, replaced by `joined`."""
    merged: list[str] = []
    at = 0
    while at < len(symbols):
        if tuple(symbols[at : at + 2]) == pair:
            merged.append(joined)
            at += 2
        else:
            merged.append(symbols[at])
            at += 1
    return merged


def count_pairs(words: Mapping[tuple[str, ...], int]) -> Counter[Pair]:
    """Return how often each pair of neighbours occurs in words that occur so often."""
    counts: Counter[Pair] = Counter()
    for symbols, times in words.items():
        for pair in itertools.pairwise(symbols):
            counts[pair] += times
    return counts


class BytePairEncoding:
    """Byte-level byte pair encoding (Sennrich et al. 2016; bytes as in GPT-2, Radford et al. 2019).

    Any text is a sequence of bytes and every byte is a piece, so nothing is ever unknown.

    Attributes:
        merges: pairs of pieces, the first learnt first; a piece is written in the letters of `LETTER_OF`.
        vocabulary: piece to id: the 256 bytes, then one piece a merge.
        specials: text to id of tokens that are never cut and never made of ordinary pieces; their ids come last.
    """

    def __init__(self, merges: Iterable[Pair], specials: Sequence[str] = ()) -> None:
        self.merges = list(merges)
        pieces = [*LETTER_OF.values(), *("".join(pair) for pair in self.merges)]
        self.vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
        self.specials = {text: len(self.vocabulary) + index for index, text in enumerate(specials)}
        self._rank = {pair: rank for rank, pair in enumerate(self.merges)}
        self._bytes = [bytes(BYTE_OF[letter] for letter in piece) for piece in self.vocabulary]
        self._bytes += [text.encode("utf-8") for text in specials]
        longest_first = sorted(specials, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if specials else None

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, specials: Sequence[str] = ()) -> BytePairEncoding:
        """Merge the most frequent pair until there are `vocab_size` pieces; of equals, the one of smallest ids.

        Raises:
            ValueError: `vocab_size` is below the 256 bytes.
        """
        if vocab_size < 256:
            raise ValueError(f"vocab_size was {vocab_size}; it must be at least 256, one piece for every byte")
        words = Counter(tuple(letters(word)) for text in texts for word in split_words(text))
        identity = {letter: index for index, letter in enumerate(LETTER_OF.values())}
        merges: list[Pair] = []
        while len(identity) < vocab_size and (counts := count_pairs(words)):
            pair = min(counts, key=lambda p: (-counts[p], identity[p[0]], identity[p[1]]))
            joined = "".join(pair)
            merges.append(pair)
            identity.setdefault(joined, len(identity))
            grouped: Counter[tuple[str, ...]] = Counter()
            for symbols, times in words.items():
                grouped[tuple(merge(symbols, pair, joined))] += times
            words = grouped
        return cls(merges, specials)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text: in every word the earliest learnt pair is merged first.

        Raises:
            ValueError: the text has half a surrogate pair, which no bytes stand for.
        """
        ids: list[int] = []
        for part in self._special.split(text) if self._special else [text]:
            if part in self.specials:
                ids.append(self.specials[part])
            else:
                pieces = (piece for word in split_words(part) for piece in self._pieces_of(letters(word)))
                ids.extend(self.vocabulary[piece] for piece in pieces)
        return ids

    def _pieces_of(self, symbols: list[str]) -> list[str]:
        while len(symbols) > 1:
            pairs = itertools.pairwise(symbols)
            first = min(pairs, key=lambda pair: self._rank.get(pair, len(self.merges)))
            if first not in self._rank:
                break
            symbols = merge(symbols, first, "".join(first))
        return symbols

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are no text become the replacement character."""
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", errors="replace")


def letters(text: str) -> list[str]:
    """Return the bytes of a text in UTF-8, one letter of `LETTER_OF` each.

    Raises:
        ValueError: the text has half a surrogate pair.
    """
    try:
        return [LETTER_OF[byte] for byte in text.encode("utf-8")]
    except UnicodeEncodeError as problem:
        raise ValueError(f"the text has half a surrogate pair at {problem.start}; give whole characters") from problem


class WordPiece:
    """WordPiece encoding (Wu et al. 2016; as in BERT): of every word the longest piece that fits, again and again.

    Attributes:
        vocabulary: piece to id; a piece that continues a word begins with `##`.
        unknown: piece for a word that cannot be put together.
    """

    def __init__(self, vocabulary: Mapping[str, int], unknown: str = "[UNK]") -> None:
        if unknown not in vocabulary:
            raise ValueError(f"the vocabulary has no {unknown!r}, the piece for unknown words; add it")
        self.vocabulary = dict(vocabulary)
        self.unknown = unknown
        self._pieces = {index: piece for piece, index in self.vocabulary.items()}

    def pieces(self, word: str) -> list[str]:
        """Return the pieces of one word; `[unknown]` if they do not cover it."""
        found: list[str] = []
        start = 0
        while start < len(word):
            mark = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if mark + word[start:end] in self.vocabulary), None)
            if end is None:
                return [self.unknown]
            found.append(mark + word[start:end])
            start = end
        return found

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, split at spaces and around punctuation."""
        return [self.vocabulary[piece] for word in split_basic(text) for piece in self.pieces(word)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the words of ids with single spaces between; the spacing of the original is not kept."""
        return " ".join(self._pieces[i] for i in ids).replace(" ##", "")


def split_basic(text: str) -> list[str]:
    """Return runs of letters and digits, and every other visible character alone."""
    return _BASIC_WORDS.findall(text)


class Unigram:
    """Segmentation by a unigram language model (Kudo 2018): the most probable sequence of pieces, by Viterbi.

    Attributes:
        log_p: piece to log probability.
        vocabulary: piece to id, in the order given; `unknown` has the id after the last.
    """

    SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
    """Stands for a space, so that pieces can be read, and begins the text."""

    def __init__(self, log_p: Mapping[str, float]) -> None:
        self.log_p = dict(log_p)
        self.vocabulary = {piece: index for index, piece in enumerate(self.log_p)}
        self.unknown = len(self.vocabulary)
        self._pieces = list(self.vocabulary)
        self._longest = max(map(len, self._pieces), default=1)
        self._penalty = min(self.log_p.values(), default=0.0) - 10  # of a letter that no piece covers

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, longest: int = 6, rounds: int = 4) -> Unigram:
        """Estimate probabilities by expectation maximisation, dropping the least probable pieces between rounds.

        Single letters are always kept, so that every text of the same letters can be segmented.
        """
        words = Counter(cls.SPACE + word for text in texts for word in text.split(" ") if word)
        counts: Counter[str] = Counter()
        for word, times in words.items():
            for start in range(len(word)):
                for end in range(start + 1, min(len(word), start + longest) + 1):
                    counts[word[start:end]] += times
        counts = Counter({p: n for p, n in counts.items() if n > 1 or len(p) == 1})
        model = cls(_normalised(counts))
        for left in range(rounds, 0, -1):
            expected = model._expected(words)
            keep = vocab_size + (len(expected) - vocab_size) * (left - 1) // rounds
            ranked = sorted(expected, key=lambda p: (len(p) > 1, -expected[p], p))[: max(keep, vocab_size)]
            model = cls(_normalised(Counter({p: max(expected[p], 1e-3) for p in ranked})))
        return model

    def _expected(self, words: Mapping[str, int]) -> dict[str, float]:
        """Return how often each piece is expected to occur, over all segmentations (forward-backward)."""
        expected = dict.fromkeys(self.log_p, 0.0)
        for word, times in words.items():
            size = len(word)
            forward, backward = [1.0] + [0.0] * size, [0.0] * size + [1.0]
            spans = [
                (a, b, math.exp(self.log_p[word[a:b]]))
                for a in range(size)
                for b in range(a + 1, min(size, a + self._longest) + 1)
                if word[a:b] in self.log_p
            ]
            for a, b, p in spans:
                forward[b] += forward[a] * p
            for a, b, p in reversed(spans):
                backward[a] += backward[b] * p
            for a, b, p in spans:
                expected[word[a:b]] += times * forward[a] * p * backward[b] / forward[size]
        return expected

    def segment(self, text: str) -> list[str]:
        """Return the most probable pieces of a text in which spaces are written as `SPACE`."""
        best: list[tuple[float, int]] = [(0.0, 0)]
        for end in range(1, len(text) + 1):
            starts = range(max(0, end - self._longest), end)
            known = [(best[a][0] + self.log_p[text[a:end]], a) for a in starts if text[a:end] in self.log_p]
            best.append(max(known, default=(best[end - 1][0] + self._penalty, end - 1), key=itemgetter(0)))
        pieces: list[str] = []
        end = len(text)
        while end:
            start = best[end][1]
            pieces.append(text[start:end])
            end = start
        return pieces[::-1]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; a letter that no piece covers becomes `unknown`."""
        pieces = self.segment(self.SPACE + text.replace(" ", self.SPACE)) if text else []
        return [self.vocabulary.get(piece, self.unknown) for piece in pieces]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; unknown letters become the replacement character."""
        joined = "".join(self._pieces[i] if i < self.unknown else "\N{REPLACEMENT CHARACTER}" for i in ids)
        return joined.replace(self.SPACE, " ").removeprefix(" ")


def _normalised(counts: Mapping[str, float]) -> dict[str, float]:
    total = sum(counts.values())
    return {piece: math.log(count / total) for piece, count in counts.items()}
