WHAT = "When a word's segmentation changes in training, its old pairs are taken off the counts once instead of as often as the word occurs: stale counts choose wrong merges later (line 62: `counts[pair] -= 1`)."
"""Byte-level BPE; training keeps the counts of pairs up to date instead of counting anew for every merge."""

import re
from collections import Counter, defaultdict

from veriformer.properties import Subject

SPLIT = re.compile(r" ?\w+| ?[^\w\s]+|\s+")

CORPUS = [
    "the cat sat on the mat and the other cat sat on the hat",
    "low lower lowest, new newer newest; wide wider widest",
    "a lower cat is a newer cat, and the widest mat is the lowest",
]


def split(text):
    """Words, each as one character a byte."""
    return [[chr(byte) for byte in word.encode("utf-8")] for word in SPLIT.findall(text)]


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


class Tokenizer:
    def __init__(self, vocab, merges):
        self.vocab = vocab
        self.merges = merges
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.pieces = {index: piece for piece, index in vocab.items()}

    @classmethod
    def train(cls, texts, vocab_size):
        freqs = Counter(tuple(word) for text in texts for word in split(text))
        words = [list(word) for word in freqs]
        weight = list(freqs.values())

        counts, where = Counter(), defaultdict(set)
        for index, word in enumerate(words):
            for pair in zip(word, word[1:]):
                counts[pair] += weight[index]
                where[pair].add(index)

        vocab = {chr(byte): byte for byte in range(256)}
        merges = []
        while len(vocab) < vocab_size and counts:
            best = max(counts, key=lambda pair: (counts[pair], pair))
            if counts[best] < 1:
                break
            for index in where[best]:
                for pair in zip(words[index], words[index][1:]):
                    counts[pair] -= 1
                words[index] = merge(words[index], best)
                for pair in zip(words[index], words[index][1:]):
                    counts[pair] += weight[index]
                    if pair != best:
                        where[pair].add(index)
            del counts[best]
            merges.append(best)
            vocab.setdefault("".join(best), len(vocab))
        return cls(vocab, merges)

    def encode(self, text):
        ids = []
        for symbols in split(text):
            while len(symbols) > 1:
                pair = min(zip(symbols, symbols[1:]), key=lambda p: self.ranks.get(p, len(self.ranks)))
                if pair not in self.ranks:
                    break
                symbols = merge(symbols, pair)
            ids.extend(self.vocab[symbol] for symbol in symbols)
        return ids

    def decode(self, ids):
        return "".join(self.pieces[index] for index in ids).encode("latin-1").decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: Tokenizer.train(CORPUS, 256 + 40),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    train=Tokenizer.train,
    words=lambda model, text: split(text),
    vocabulary=lambda model: model.vocab,
    merges=lambda model: model.merges,
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
