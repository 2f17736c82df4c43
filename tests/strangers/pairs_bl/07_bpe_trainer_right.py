"""Byte-level BPE. Training keeps the counts of pairs up to date instead of counting all words again each time."""

import re
from collections import Counter, defaultdict

from veriformer.properties import Subject

WORD = re.compile(r" ?[^\s]+|\s+(?!\S)|\s+")
CORPUS = (
    "the cat sat on the mat and the rat sat on the cat",
    "lower lowest newer newest wider widest low new wide",
    "she sells sea shells on the sea shore and the shells she sells are sea shells",
    "a model that is trained on tokens of words that are rare trains rarely",
)


def split_words(text):
    return WORD.findall(text)


def to_symbols(word):
    """One symbol a byte, written as the character of that number."""
    return list(word.encode("utf-8").decode("latin-1"))


def apply_merge(symbols, pair):
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
        self.ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        pieces = [chr(i) for i in range(256)] + [a + b for a, b in self.merges]
        self.vocab = {}
        for piece in pieces:
            self.vocab.setdefault(piece, len(self.vocab))
        self.pieces = {number: piece for piece, number in self.vocab.items()}

    def segment(self, symbols):
        while len(symbols) > 1:
            pair = min(zip(symbols, symbols[1:]), key=lambda p: self.ranks.get(p, len(self.ranks)))
            if pair not in self.ranks:
                break
            symbols = apply_merge(symbols, pair)
        return symbols

    def encode(self, text):
        return [self.vocab[piece] for word in split_words(text) for piece in self.segment(to_symbols(word))]

    def decode(self, ids):
        return "".join(self.pieces[int(i)] for i in ids).encode("latin-1").decode("utf-8", errors="replace")


def train(texts, vocab_size):
    frequency = Counter(word for text in texts for word in split_words(text))
    words = [(to_symbols(word), count) for word, count in frequency.items()]
    counts, places = Counter(), defaultdict(set)
    for at, (symbols, count) in enumerate(words):
        for pair in zip(symbols, symbols[1:]):
            counts[pair] += count
            places[pair].add(at)

    merges = []
    while 256 + len(merges) < vocab_size and counts:
        best = max(counts, key=lambda pair: (counts[pair], pair))
        if counts[best] < 1:
            break
        merges.append(best)
        for at in sorted(places.pop(best)):
            symbols, count = words[at]
            merged = apply_merge(symbols, best)
            for pair in zip(symbols, symbols[1:]):
                counts[pair] -= count
            for pair in zip(merged, merged[1:]):
                counts[pair] += count
                places[pair].add(at)
            words[at] = (merged, count)
    return BPE(merges)


subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: train(CORPUS, 256 + 48),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    train=train,
    words=lambda m, text: [to_symbols(word) for word in split_words(text)],
    vocabulary=lambda m: m.vocab,
    merges=lambda m: m.merges,
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
