WHAT = "when a merge has changed a word, its old pairs are taken off times its frequency but the new ones counted once (line 82: += 1 instead of += n): from the second merge on, pairs are not the most frequent"
"""Byte-level BPE with a trainer that keeps the counts of pairs up to date instead of counting anew for each merge."""

import re
from collections import Counter, defaultdict

from veriformer.properties import Subject

SPLIT = re.compile(r" ?\w+| ?[^\w\s]+|\s+")
CORPUS = [
    "the lower the newer, the wider the slower",
    "newest and widest: the newest widest newest low low low lower",
    "a tokenizer cuts the text into the pieces of the text",
    "slow and low, the old and the new; the token of tokens",
]


def byte_alphabet():
    """A printable character for each byte, as GPT-2 has it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in printable}
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + len(table) - len(printable))
    return table


ENCODE = byte_alphabet()
DECODE = {c: b for b, c in ENCODE.items()}


def words_of(text):
    return ["".join(ENCODE[b] for b in word.encode("utf-8")) for word in SPLIT.findall(text)]


def merged(symbols, pair):
    out, i = [], 0
    while i < len(symbols):
        if symbols[i : i + 2] == list(pair):
            out.append(pair[0] + pair[1])
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out


class BPE:
    def __init__(self, merges):
        self.merges = merges
        self.rank = {pair: i for i, pair in enumerate(merges)}
        self.vocab = {c: i for i, c in enumerate(ENCODE[b] for b in range(256))}
        for left, right in merges:
            self.vocab.setdefault(left + right, len(self.vocab))
        self.pieces = {i: piece for piece, i in self.vocab.items()}

    @classmethod
    def train(cls, texts, vocab_size):
        frequency = Counter(word for text in texts for word in words_of(text))
        words = [(list(word), n) for word, n in frequency.items()]
        counts, where = Counter(), defaultdict(set)
        for w, (symbols, n) in enumerate(words):
            for pair in zip(symbols, symbols[1:]):
                counts[pair] += n
                where[pair].add(w)

        merges = []
        seen = set(ENCODE.values())
        while len(seen) < vocab_size:
            best = max(counts, key=lambda pair: (counts[pair], pair), default=None)
            if best is None or counts[best] < 1:
                break
            merges.append(best)
            seen.add(best[0] + best[1])
            for w in where.pop(best):
                symbols, n = words[w]
                for pair in zip(symbols, symbols[1:]):
                    counts[pair] -= n
                symbols = merged(symbols, best)
                words[w] = (symbols, n)
                for pair in zip(symbols, symbols[1:]):
                    counts[pair] += 1
                    where[pair].add(w)
            counts = +counts
        return cls(merges)

    def segment(self, word):
        symbols = list(word)
        while len(symbols) > 1:
            best = min(zip(symbols, symbols[1:]), key=lambda pair: self.rank.get(pair, len(self.rank)))
            if best not in self.rank:
                break
            symbols = merged(symbols, best)
        return symbols

    def encode(self, text):
        return [self.vocab[piece] for word in words_of(text) for piece in self.segment(word)]

    def decode(self, ids):
        return bytes(DECODE[c] for i in ids for c in self.pieces[i]).decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="BPE",
    build=lambda c: BPE.train(CORPUS, 300),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    train=BPE.train,
    words=lambda m, text: [list(word) for word in words_of(text)],
    vocabulary=lambda m: m.vocab,
    merges=lambda m: m.merges,
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
