"""Byte-level BPE with a cache of words, as in GPT-2's encoder.py."""
import re
from collections import Counter

from veriformer.properties import Subject

CORPUS = "low lower lowest new newer newest wide wider widest the slow show of the widest river is the newest"
SPLIT = re.compile(r"\s*\S+|\s+")


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


class Encoder:
    """A piece is a string of bytes, each as the character of its number."""

    def __init__(self, corpus=CORPUS, merges=30):
        words = Counter(tuple(w) for w in self.split(corpus))
        self.merges = []
        for _ in range(merges):
            pairs = Counter()
            for word, n in words.items():
                for p in zip(word, word[1:]):
                    pairs[p] += n
            if not pairs:
                break
            best = max(pairs, key=lambda p: (pairs[p], p))
            self.merges.append(best)
            merged = Counter()
            for word, n in words.items():
                merged[tuple(merge(list(word), best))] += n
            words = merged
        self.rank = {p: i for i, p in enumerate(self.merges)}
        self.vocab = {chr(i): i for i in range(256)}
        for a, b in self.merges:
            self.vocab.setdefault(a + b, len(self.vocab))
        self.pieces = {i: p for p, i in self.vocab.items()}
        self.cache = {}

    def split(self, text):
        return [w.encode("utf-8").decode("latin-1") for w in SPLIT.findall(text)]

    def bpe(self, word):
        if word in self.cache:
            return self.cache[word]
        symbols = list(word)
        while len(symbols) > 1:
            best = min(zip(symbols, symbols[1:]), key=lambda p: self.rank.get(p, len(self.rank)))
            if best not in self.rank:
                break
            symbols = merge(symbols, best)
        self.cache[word] = [self.vocab[s] for s in symbols]
        return self.cache[word]

    def encode(self, text):
        words = self.split(text)
        if not words:
            return []
        ids = list(self.bpe(words[0]))
        for word in words[1:]:
            ids += self.bpe(word)
        return ids

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids).encode("latin-1").decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: Encoder(),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    words=lambda m, text: [list(w) for w in m.split(text)],
    vocabulary=lambda m: dict(m.vocab),
    merges=lambda m: list(m.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
