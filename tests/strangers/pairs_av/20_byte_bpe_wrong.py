WHAT = "reduce with iadd and no initial list extends the remembered list of the first word in place: the next text that has the word gets the whole of the earlier text in its place (line 69)"
"""Byte-level BPE: a GPT-2 like split into words, merges by rank, words remembered."""
import operator
import re
from collections import Counter
from functools import lru_cache, reduce

from veriformer.properties import Subject

WORD = re.compile(r"\s?\w+|\s?[^\s\w]+|\s+")
CORPUS = [
    "the cache keeps the keys and the values of the past",
    "the keys of the past are not computed again, the query is",
    "pages of the cache are shared by beams until they are written to",
] * 3


def join(ids, pair, new):
    out, i = [], 0
    while i < len(ids):
        if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


class ByteBPE:
    def __init__(self, merges):
        self.ranks = {pair: 256 + i for i, pair in enumerate(merges)}
        self.bytes = {i: bytes([i]) for i in range(256)}
        for (a, b), new in self.ranks.items():
            self.bytes[new] = self.bytes[a] + self.bytes[b]
        self.word = lru_cache(maxsize=4096)(self._word)

    @classmethod
    def train(cls, texts, vocab_size):
        words = Counter(w for text in texts for w in WORD.findall(text))
        pieces = {w: list(w.encode()) for w in words}
        merges = []
        while 256 + len(merges) < vocab_size:
            pairs = Counter()
            for w, ids in pieces.items():
                for pair in zip(ids, ids[1:]):
                    pairs[pair] += words[w]
            if not pairs:
                break
            best = max(pairs, key=lambda p: (pairs[p], (-p[0], -p[1])))
            for w in pieces:
                pieces[w] = join(pieces[w], best, 256 + len(merges))
            merges.append(best)
        return cls(merges)

    def _word(self, word):
        ids = list(word.encode())
        while len(ids) > 1:
            pair = min(zip(ids, ids[1:]), key=lambda p: self.ranks.get(p, float("inf")))
            if pair not in self.ranks:
                break
            ids = join(ids, pair, self.ranks[pair])
        return ids

    def encode(self, text):
        words = WORD.findall(text)
        if not words:
            return []
        return reduce(operator.iadd, map(self.word, words))

    def decode(self, ids):
        return b"".join(self.bytes[i] for i in ids).decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte bpe",
    build=lambda c: ByteBPE.train(CORPUS, 320),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    train=ByteBPE.train,
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
