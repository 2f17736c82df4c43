"""Byte-level BPE with incremental training: only words that hold the merged pair are counted again."""
import re
from collections import Counter, defaultdict

from veriformer.properties import Subject

WORD = re.compile(r" ?[^\s]+|\s+")
CORPUS = [
    "the theory of the thing is that the other things are there then and there",
    "she sells sea shells by the sea shore and the shells she sells are sea shells",
    "a better batter makes the bitter butter better than the other butter",
]


def bytes_to_unicode():
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {b: chr(b) for b in shown}, 0
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + extra)
            extra += 1
    return table


BYTES = bytes_to_unicode()
UNBYTES = {c: b for b, c in BYTES.items()}


def pretokenize(text):
    return [[BYTES[b] for b in word.encode("utf-8")] for word in WORD.findall(text)]


def merge(symbols, pair, joined):
    out, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            out.append(joined)
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out


class BPE:
    def __init__(self, merges):
        self.merges = list(merges)
        self.vocab = {BYTES[b]: b for b in range(256)}
        for a, b in self.merges:
            self.vocab.setdefault(a + b, len(self.vocab))
        self.pieces = {i: p for p, i in self.vocab.items()}
        self.ranks = {pair: i for i, pair in reversed(list(enumerate(self.merges)))}

    def bpe(self, symbols):
        while len(symbols) > 1:
            pair = min(zip(symbols, symbols[1:]), key=lambda p: self.ranks.get(p, float("inf")))
            if pair not in self.ranks:
                break
            symbols = merge(symbols, pair, pair[0] + pair[1])
        return symbols

    def encode(self, text):
        return [self.vocab[s] for word in pretokenize(text) for s in self.bpe(word)]

    def decode(self, ids):
        return bytes(UNBYTES[c] for i in ids for c in self.pieces[i]).decode("utf-8", errors="replace")


def train(texts, vocab_size):
    frequency = Counter(tuple(word) for text in texts for word in pretokenize(text))
    words = [list(word) for word in frequency]
    times = list(frequency.values())
    counts, where = Counter(), defaultdict(set)
    for i, word in enumerate(words):
        for pair in zip(word, word[1:]):
            counts[pair] += times[i]
            where[pair].add(i)

    merges, known = [], set(BYTES.values())
    while len(known) < vocab_size and counts:
        pair = max(counts, key=lambda p: (counts[p], p))
        if counts[pair] < 1:
            break
        joined = pair[0] + pair[1]
        merges.append(pair)
        known.add(joined)
        for i in where.pop(pair):
            new = merge(words[i], pair, joined)
            for old in zip(words[i], words[i][1:]):
                counts[old] -= times[i]
            for fresh in zip(new, new[1:]):
                counts[fresh] += times[i]
                where[fresh].add(i)
            words[i] = new
        counts.pop(pair)
    return BPE(merges)


subject = Subject(
    kind="tokenizer",
    name="incremental BPE",
    build=lambda c: train(CORPUS, 256 + 40),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    train=train,
    words=lambda m, text: pretokenize(text),
    vocabulary=lambda m: dict(m.vocab),
    merges=lambda m: list(m.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
