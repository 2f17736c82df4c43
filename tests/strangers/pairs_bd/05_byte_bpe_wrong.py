WHAT = "the cache of words is an attribute of the class: a second tokenizer returns, for words that a first one has met, the ids of the first one's merges (line 50)"
"""Byte-level BPE, GPT-2's alphabet, with a cache of words."""

import re
from collections import Counter

from veriformer.properties import Subject

SPLIT = re.compile(r" ?\w+| ?[^\s\w]+|\s+")
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the other dogs look on",
    "there is nothing either good or bad, but thinking makes it so",
    "a model that models the mother of all models is another model",
    "speech recognition and speech synthesis share an acoustic front end",
]


def bytes_to_unicode():
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    chars, extra = list(keep), 0
    for b in range(256):
        if b not in keep:
            keep.append(b)
            chars.append(256 + extra)
            extra += 1
    return dict(zip(keep, map(chr, chars)))


BYTE = bytes_to_unicode()
UNBYTE = {c: b for b, c in BYTE.items()}


def pre_tokenize(text):
    return ["".join(BYTE[b] for b in piece.encode("utf-8")) for piece in SPLIT.findall(text)]


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


class ByteBPE:
    cache = {}  # word -> ids

    def __init__(self, merges):
        self.merges = list(merges)
        self.ranks = {pair: i for i, pair in enumerate(self.merges)}
        pieces = [BYTE[b] for b in range(256)] + [a + b for a, b in self.merges]
        self.encoder = {}
        for piece in pieces:
            self.encoder.setdefault(piece, len(self.encoder))
        self.decoder = {i: p for p, i in self.encoder.items()}

    @classmethod
    def train(cls, texts, vocab_size):
        words = {w: (list(w), n) for w, n in Counter(w for t in texts for w in pre_tokenize(t)).items()}
        merges, known = [], {BYTE[b] for b in range(256)}
        while len(known) < vocab_size:
            pairs = Counter()
            for symbols, n in words.values():
                for pair in zip(symbols, symbols[1:]):
                    pairs[pair] += n
            if not pairs:
                break
            best = min(pairs, key=lambda p: (-pairs[p], p))
            merges.append(best)
            known.add(best[0] + best[1])
            words = {w: (merge(s, best), n) for w, (s, n) in words.items()}
        return cls(merges)

    def bpe(self, word):
        if word in self.cache:
            return self.cache[word]
        symbols = list(word)
        while len(symbols) > 1:
            best = min(zip(symbols, symbols[1:]), key=lambda p: self.ranks.get(p, float("inf")))
            if best not in self.ranks:
                break
            symbols = merge(symbols, best)
        ids = tuple(self.encoder[s] for s in symbols)
        self.cache[word] = ids
        return ids

    def encode(self, text):
        return [i for word in pre_tokenize(text) for i in self.bpe(word)]

    def decode(self, ids):
        data = bytes(UNBYTE[c] for i in ids for c in self.decoder[i])
        return data.decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte BPE",
    build=lambda c: ByteBPE.train(CORPUS, 330),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    train=lambda texts, vocab_size: ByteBPE.train(texts, vocab_size),
    words=lambda model, text: [list(word) for word in pre_tokenize(text)],
    vocabulary=lambda model: dict(model.encoder),
    merges=lambda model: list(model.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
