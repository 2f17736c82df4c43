WHAT = "pairs are counted once for every distinct word, without its frequency, so merges are not those of the most frequent pairs (line 66)."
"""Byte-level BPE, GPT-2's alphabet. Training works on distinct words with their frequencies, not on running text."""

import re
from collections import Counter
from functools import lru_cache

from veriformer.properties import Subject

SPLIT = re.compile(r" ?\S+|\s+(?!\S)|\s+")
CORPUS = [
    "the cat sat on the mat and the rat sat on the hat",
    "that the other weather is rather better than this weather",
    "she sells sea shells on the sea shore; the shells she sells are sea shells",
    "lower lowest newer newest wider widest, low low low new new wide",
]


@lru_cache(maxsize=1)
def byte_alphabet():
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, spare = {b: chr(b) for b in shown}, 256
    for b in range(256):
        if b not in table:
            table[b] = chr(spare)
            spare += 1
    return table


def symbols(word):
    table = byte_alphabet()
    return [table[b] for b in word.encode("utf-8")]


def merge(word, pair):
    out, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


class ByteBPE:
    def __init__(self, merges):
        self.merges = list(merges)
        self.ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        self.vocab = {piece: b for b, piece in sorted(byte_alphabet().items())}
        for a, b in self.merges:
            self.vocab.setdefault(a + b, len(self.vocab))
        self.pieces = {i: piece for piece, i in self.vocab.items()}
        self.bytes = {piece: b for b, piece in byte_alphabet().items()}
        self.known = {}

    @classmethod
    def train(cls, texts, vocab_size):
        frequency = Counter(word for text in texts for word in SPLIT.findall(text))
        words = [(symbols(word), count) for word, count in frequency.items()]
        merges, made = [], set(byte_alphabet().values())
        while len(made) < vocab_size:
            pairs = Counter()
            for word, _ in words:
                pairs.update(zip(word, word[1:]))
            if not pairs:
                break
            best = min(pairs, key=lambda pair: (-pairs[pair], pair))
            merges.append(best)
            made.add(best[0] + best[1])
            words = [(merge(word, best), count) for word, count in words]
        return cls(merges)

    def segment(self, word):
        if word not in self.known:
            parts = symbols(word)
            while len(parts) > 1:
                best = min(zip(parts, parts[1:]), key=lambda pair: self.ranks.get(pair, len(self.ranks)))
                if best not in self.ranks:
                    break
                parts = merge(parts, best)
            self.known[word] = [self.vocab[part] for part in parts]
        return self.known[word]

    def encode(self, text):
        return [i for word in SPLIT.findall(text) for i in self.segment(word)]

    def decode(self, ids):
        return bytes(self.bytes[ch] for i in ids for ch in self.pieces[int(i)]).decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: ByteBPE.train(CORPUS, 256 + 40),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    train=ByteBPE.train,
    words=lambda m, text: [symbols(word) for word in SPLIT.findall(text)],
    vocabulary=lambda m: dict(m.vocab),
    merges=lambda m: list(m.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
