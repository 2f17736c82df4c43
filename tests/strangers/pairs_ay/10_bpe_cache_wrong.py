WHAT = "reduce with iadd has no list to start from, so it appends to the cached ids of the first word: every later text with that word gets the tokens of this text as well, line 79."
"""Byte-level BPE with a cache of words."""

import functools
import operator
import re
from collections import Counter

from veriformer.properties import Subject

WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s+")
CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "low lower lowest new newer newest wide wider widest",
    "there is nothing there that the others have not seen",
    "she sells sea shells on the sea shore, the shells she sells are sea shells",
]


def symbols(word):
    return [chr(byte) for byte in word.encode("utf-8")]


def merge(pieces, pair):
    out, i = [], 0
    while i < len(pieces):
        if i + 1 < len(pieces) and (pieces[i], pieces[i + 1]) == pair:
            out.append(pieces[i] + pieces[i + 1])
            i += 2
        else:
            out.append(pieces[i])
            i += 1
    return out


class Tokenizer:
    def __init__(self, merges):
        self.merges = list(merges)
        self.rank = {pair: i for i, pair in enumerate(self.merges)}
        self.vocab = {chr(byte): byte for byte in range(256)}
        for left, right in self.merges:
            self.vocab.setdefault(left + right, len(self.vocab))
        self.pieces = {i: piece for piece, i in self.vocab.items()}
        self.cache = {}

    @classmethod
    def train(cls, texts, vocab_size):
        counts = Counter(word for text in texts for word in WORD.findall(text))
        words = [(symbols(word), n) for word, n in counts.items()]
        merges = []
        while 256 + len(merges) < vocab_size:
            pairs = Counter()
            for pieces, n in words:
                for pair in zip(pieces, pieces[1:]):
                    pairs[pair] += n
            if not pairs:
                break
            best = max(pairs, key=lambda pair: (pairs[pair], pair))
            merges.append(best)
            words = [(merge(pieces, best), n) for pieces, n in words]
        return cls(merges)

    def bpe(self, word):
        if word in self.cache:
            return self.cache[word]
        pieces = symbols(word)
        while len(pieces) > 1:
            best = min(zip(pieces, pieces[1:]), key=lambda pair: self.rank.get(pair, float("inf")))
            if best not in self.rank:
                break
            pieces = merge(pieces, best)
        ids = [self.vocab[piece] for piece in pieces]
        self.cache[word] = ids
        return ids

    def encode(self, text):
        if not text:
            return []
        return functools.reduce(operator.iadd, map(self.bpe, WORD.findall(text)))

    def decode(self, ids):
        joined = "".join(self.pieces[i] for i in ids)
        return bytes(ord(letter) for letter in joined).decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: Tokenizer.train(CORPUS, 300),
    forward=lambda tokenizer, text: list(tokenizer.encode(text)),
    decode=lambda tokenizer, ids: tokenizer.decode(ids),
    train=Tokenizer.train,
    words=lambda tokenizer, text: [symbols(word) for word in WORD.findall(text)],
    vocabulary=lambda tokenizer: dict(tokenizer.vocab),
    merges=lambda tokenizer: list(tokenizer.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
