"""Byte-level BPE; the trainer keeps the counts of pairs up to date instead of counting anew for every merge."""

import re
from collections import Counter

from veriformer.properties import Subject

CORPUS = [
    "the lower the newer the wider, the newest is the widest and the lowest is low",
    "she sells sea shells by the sea shore; the shells she sells are sea shells",
    "low low low low lower lower newest newest newest newest newest newest widest widest widest",
    "a tokenizer that is trained on tokens tokenizes the tokens of the trainer",
]


def _byte_letters():
    """GPT-2's printable letter for every byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, spare = {b: chr(b) for b in plain}, 256
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(spare)
            spare += 1
    return letters


LETTER = _byte_letters()
BYTE = {letter: byte for byte, letter in LETTER.items()}
SPLIT = re.compile(r" ?[^\s]+|\s+")


def split_words(text):
    return [[LETTER[b] for b in word.encode("utf-8")] for word in SPLIT.findall(text)]


def merge(symbols, pair):
    out, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            out.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out


class BPE:
    def __init__(self, merges):
        self.merges = list(merges)
        self.rank = {pair: r for r, pair in enumerate(self.merges)}
        self.vocab = {LETTER[b]: b for b in range(256)}
        for a, b in self.merges:
            self.vocab.setdefault(a + b, len(self.vocab))
        self.pieces = {i: piece for piece, i in self.vocab.items()}

    def segment(self, symbols):
        while len(symbols) > 1:
            best = min(zip(symbols, symbols[1:]), key=lambda pair: self.rank.get(pair, len(self.rank)))
            if best not in self.rank:
                break
            symbols = merge(symbols, best)
        return symbols

    def encode(self, text):
        return [self.vocab[piece] for word in split_words(text) for piece in self.segment(word)]

    def decode(self, ids):
        return bytes(BYTE[letter] for i in ids for letter in self.pieces[i]).decode("utf-8", errors="replace")


def train(texts, vocab_size):
    frequency = Counter(tuple(word) for text in texts for word in split_words(text))
    words = [(list(word), times) for word, times in frequency.items()]
    counts = Counter()
    for symbols, times in words:
        for pair in zip(symbols, symbols[1:]):
            counts[pair] += times

    merges, pieces = [], set(LETTER.values())
    while len(pieces) < vocab_size:
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or counts[best] < 1:
            break
        merges.append(best)
        pieces.add(best[0] + best[1])
        for index, (symbols, times) in enumerate(words):
            if best not in zip(symbols, symbols[1:]):
                continue
            merged = merge(symbols, best)
            for pair in zip(symbols, symbols[1:]):
                counts[pair] -= times
            for pair in zip(merged, merged[1:]):
                counts[pair] += times
            words[index] = (merged, times)
    return BPE(merges)


subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: train(CORPUS, 300),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    train=train,
    words=lambda model, text: split_words(text),
    vocabulary=lambda model: dict(model.vocab),
    merges=lambda model: list(model.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
