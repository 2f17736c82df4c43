"""Byte-level BPE as GPT-2 has it: words by a regular expression, merges by rank, words remembered."""

import operator
import re
from collections import Counter
from functools import reduce

from veriformer.properties import Subject

WORDS = re.compile(r" ?\w+| ?[^\s\w]+|\s+(?!\S)|\s+")


def bytes_to_unicode():
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table, extra = {b: chr(b) for b in shown}, 0
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + extra)
            extra += 1
    return table


BYTE_TO_CHAR = bytes_to_unicode()
CHAR_TO_BYTE = {c: b for b, c in BYTE_TO_CHAR.items()}


def symbols(word):
    return [BYTE_TO_CHAR[b] for b in word.encode("utf-8")]


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


def learn(texts, vocab_size):
    words = Counter(w for text in texts for w in WORDS.findall(text))
    table = {w: symbols(w) for w in words}
    merges = []
    while 256 + len(merges) < vocab_size:
        pairs = Counter()
        for w, n in words.items():
            for pair in zip(table[w], table[w][1:]):
                pairs[pair] += n
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        table = {w: merge(p, best) for w, p in table.items()}
    return merges


class Tokenizer:
    def __init__(self, merges):
        self.merges = list(merges)
        self.ranks = {pair: i for i, pair in enumerate(self.merges)}
        pieces = [BYTE_TO_CHAR[b] for b in range(256)] + [a + b for a, b in self.merges]
        self.vocab = {}
        for piece in pieces:
            self.vocab.setdefault(piece, len(self.vocab))
        self.pieces = {i: p for p, i in self.vocab.items()}
        self.seen = {}

    def word_ids(self, word):
        if word not in self.seen:
            pieces = symbols(word)
            while len(pieces) > 1:
                best = min(zip(pieces, pieces[1:]), key=lambda p: self.ranks.get(p, float("inf")))
                if best not in self.ranks:
                    break
                pieces = merge(pieces, best)
            self.seen[word] = [self.vocab[p] for p in pieces]
        return self.seen[word]

    def encode(self, text):
        words = WORDS.findall(text)
        if not words:
            return []
        return reduce(operator.iadd, map(self.word_ids, words), [])

    def decode(self, ids):
        joined = "".join(self.pieces[i] for i in ids)
        return bytes(CHAR_TO_BYTE[c] for c in joined).decode("utf-8", errors="replace")


CORPUS = [
    "the cat sat on the mat and the hat sat on the cat",
    "a low lower lowest, a new newer newest; the widest river is wider than that",
    "there is nothing that the other mother would rather gather",
]
MERGES = learn(CORPUS, 300)

subject = Subject(
    kind="tokenizer",
    name="byte BPE",
    build=lambda c: Tokenizer(MERGES),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    words=lambda m, text: [symbols(w) for w in WORDS.findall(text)],
    vocabulary=lambda m: m.vocab,
    merges=lambda m: m.merges,
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
