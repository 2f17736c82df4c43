"""Byte-level BPE with a cache of words, as tokenizers of inference engines have."""

import re
from collections import Counter

import torch

from veriformer.properties import Subject

CORPUS = "the cat and the hat that then sat on the mat with the other cats and hats in the theatre then"
WORDS = re.compile(r"\s+(?!\S)| ?\S+|\s+")


def merged(parts, pair):
    out, i = [], 0
    while i < len(parts):
        if i + 1 < len(parts) and (parts[i], parts[i + 1]) == pair:
            out.append(parts[i] + parts[i + 1])
            i += 2
        else:
            out.append(parts[i])
            i += 1
    return out


def learn(text, count):
    words = Counter(WORDS.findall(text))
    pieces = {word: [bytes([b]) for b in word.encode()] for word in words}
    merges = []
    for _ in range(count):
        pairs = Counter()
        for word, parts in pieces.items():
            for pair in zip(parts, parts[1:]):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        pieces = {word: merged(parts, best) for word, parts in pieces.items()}
    return merges


class BPE:
    def __init__(self, merges):
        self.merges = merges
        self.rank = {pair: i for i, pair in enumerate(merges)}
        self.pieces = [bytes([b]) for b in range(256)]
        for a, b in merges:
            if a + b not in self.pieces:
                self.pieces.append(a + b)
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        self.cache = {}

    def word(self, word):
        key = word
        if key not in self.cache:
            parts = [bytes([b]) for b in word.encode()]
            while len(parts) > 1:
                best = min(zip(parts, parts[1:]), key=lambda pair: self.rank.get(pair, len(self.rank)))
                if best not in self.rank:
                    break
                parts = merged(parts, best)
            self.cache[key] = [self.ids[part] for part in parts]
        return self.cache[key]

    def encode(self, text):
        return [i for word in WORDS.findall(text) for i in self.word(word)]

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


subject = Subject(
    kind="tokenizer",
    build=lambda c: BPE(learn(CORPUS, 20)),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
