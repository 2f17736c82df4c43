"""Faults of tokenizers."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

from veriformer.properties.adapters.reference_tokenizers import SHIPPED, SPECIAL, encode
from veriformer.properties.subject.subject import Subject
from veriformer.reference.tokenization import BytePairEncoding, letters, merge, split_words
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put


def byte_pairs(**changes: Any) -> Subject:
    return replace(SHIPPED["byte-pairs"], **put(changes, instead_of={}))


@fault(
    "TK01",
    "Unknown characters are dropped",
    killed_by=("tokenizer.round-trip", "tokenizer.no-unknown"),
    cause="missing",
)
def dropped() -> Subject:
    return byte_pairs(forward=lambda m, text: encode(m, "".join(c for c in text if ord(c) < 0x10000)))


@fault(
    "TK04",
    "Bytes are decoded as their names",
    killed_by=("tokenizer.round-trip",),
    cause="missing",
)
def named_bytes() -> Subject:
    def decode(model: Any, ids: list[int]) -> str:
        return "".join(model.decode([i]) if "\ufffd" not in model.decode([i]) else f"<0x{i:02X}>" for i in ids)

    return byte_pairs(decode=decode)


@fault("TK-normalised", "The text is normalised first", killed_by=("tokenizer.round-trip",), cause="missing")
def normalised() -> Subject:
    import unicodedata

    return byte_pairs(forward=lambda m, text: encode(m, unicodedata.normalize("NFC", text).strip()))


@fault(
    "TK-dropout", "BPE dropout is left on", killed_by=("tokenizer.deterministic",), cause="other ids the second time"
)
def sampled() -> Subject:
    choose = random.Random(0)

    def forward(model: Any, text: str) -> list[int]:
        if choose.random() < 0.3:
            return [model.vocabulary[letter] for word in split_words(text) for letter in letters(word)]
        return encode(model, text)

    return byte_pairs(forward=forward)


@fault(
    "TK05",
    "Merges are applied left to right, not by rank",
    killed_by=("tokenizer.bpe-merges",),
    cause="a word is read from the left|the leftmost pair",
)
def left_to_right() -> Subject:
    def forward(model: BytePairEncoding, text: str) -> list[int]:
        ids = []
        for word in split_words(text):
            stack: list[str] = []
            for letter in letters(word):
                stack.append(letter)
                while len(stack) > 1 and (stack[-2], stack[-1]) in set(model.merges):
                    stack[-2:] = ["".join(stack[-2:])]
            ids += [model.vocabulary[piece] for piece in stack]
        return ids

    return byte_pairs(forward=forward, declares={"algorithm": "bpe"}, train=None)


@fault("TK-rare", "Training merges a rare pair", killed_by=("tokenizer.bpe-merges",), cause="not a most frequent pair")
def rare() -> Subject:
    def train(texts: list[str], vocab_size: int) -> BytePairEncoding:
        words = [letters(word) for text in texts for word in split_words(text)]
        merges = []
        while len(merges) < vocab_size - 256:
            pairs = [pair for word in words for pair in itertools.pairwise(word)]
            if not pairs:
                break
            merges.append(pairs[0])  # the first, not the most frequent
            words = [merge(word, pairs[0], "".join(pairs[0])) for word in words]
        return BytePairEncoding(merges)

    return byte_pairs(train=train)


@fault("TK-special", "Special tokens are cut into pieces", killed_by=("tokenizer.specials",), cause="special token")
def cut() -> Subject:
    return byte_pairs(
        forward=lambda m, text: [
            i for half in text.partition(SPECIAL[:4]) if half for i in encode(m, half)
        ]
    )  # fmt: skip


@fault("TK-shortest", "The shortest piece is taken", killed_by=("tokenizer.wordpiece",), cause="longest pieces")
def shortest() -> Subject:
    def forward(model: Any, text: str) -> list[int]:
        ids = []
        for word in SHIPPED["wordpiece"].words(model, text):  # type: ignore[misc]
            marks = ["##" if i else "" for i in range(len(word))]
            found = [model.vocabulary.get(mark + letter) for mark, letter in zip(marks, word, strict=True)]
            ids += [0] if None in found else found
        return ids

    return replace(SHIPPED["wordpiece"], forward=put(forward, instead_of=encode))


@fault("TK-greedy", "Greedy instead of Viterbi", killed_by=("tokenizer.unigram",), cause="cut greedily: the longest")
def greedy() -> Subject:
    def forward(model: Any, text: str) -> list[int]:
        rest, ids = (model.SPACE + text.replace(" ", model.SPACE)) if text else "", []
        while rest:
            end = next((e for e in range(len(rest), 0, -1) if rest[:e] in model.vocabulary), 1)
            ids.append(model.vocabulary.get(rest[:end], model.unknown))
            rest = rest[end:]
        return ids

    return replace(SHIPPED["unigram"], forward=put(forward, instead_of=encode))


@fault(
    "TK-longest",
    "Viterbi's search for pieces starts one letter too late, so that the longest are never tried",
    killed_by=("tokenizer.unigram",),
    cause="pieces of the greatest length",
)
def never_the_longest() -> Subject:
    def forward(model: Any, text: str) -> list[int]:
        word = model.SPACE + text.replace(" ", model.SPACE) if text else ""
        longest = max(map(len, model.log_p))
        best: list[tuple[float, list[int]]] = [(0.0, [])]
        for end in range(1, len(word) + 1):
            ways = []
            for start in range(max(0, end - longest + 1), end):
                piece = word[start:end]
                score = model.log_p.get(piece, -1e3 if end - start == 1 else -1e9)
                ways.append((best[start][0] + score, [*best[start][1], model.vocabulary.get(piece, model.unknown)]))
            best.append(max(ways))
        return best[-1][1]

    return replace(SHIPPED["unigram"], forward=put(forward, instead_of=encode))


@fault(
    "TK-stale-counts",
    "While training, a merge takes the pairs of a word off the counts once, not as often as the word occurs",
    killed_by=("tokenizer.bpe-merges",),
    cause="not as often as the word occurs",
)
def stale_counts() -> Subject:
    def train(texts: list[str], vocab_size: int) -> BytePairEncoding:
        words = Counter(tuple(letters(word)) for text in texts for word in split_words(text))
        counts: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in itertools.pairwise(word):
                counts[pair] += times
        merges: list[tuple[str, str]] = []
        while len(merges) < vocab_size - 256 and counts:
            best = max(counts, key=lambda pair: (counts[pair], pair))
            if counts[best] < 1:
                break
            merges.append(best)
            merged: Counter[tuple[str, ...]] = Counter()
            for word, times in words.items():
                pieces = merge(list(word), best, "".join(best))
                merged[tuple(pieces)] += times
                for pair in itertools.pairwise(word) if len(pieces) < len(word) else ():
                    counts[pair] -= put(1, instead_of=times)
                for pair in itertools.pairwise(pieces) if len(pieces) < len(word) else ():
                    counts[pair] += times
            del counts[best]
            words = merged
        return BytePairEncoding(merges)

    return byte_pairs(train=train)


@fault(
    "TK-unknown-rest",
    "Where no piece fits, the pieces found before stay and one unknown token stands for the rest of the word",
    killed_by=("tokenizer.wordpiece",),
    cause="the pieces found before stay",
)
def unknown_rest() -> Subject:
    def forward(model: Any, text: str) -> list[int]:
        ids: list[int] = []
        for symbols in SHIPPED["wordpiece"].words(model, text):  # type: ignore[misc]
            word, start = "".join(symbol.removeprefix("##") for symbol in symbols), 0
            while start < len(word):
                mark = "##" if start else ""
                fits = [n for n in range(start + 1, len(word) + 1) if mark + word[start:n] in model.vocabulary]
                ids.append(model.vocabulary[mark + word[start : fits[-1]]] if fits else model.vocabulary["[UNK]"])
                start = fits[-1] if fits else len(word)
        return ids

    return replace(SHIPPED["wordpiece"], forward=put(forward, instead_of=encode))
