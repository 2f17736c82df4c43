"""Byte-level BPE with a memo of the words that were seen."""
import re
from collections import Counter

import torch  # noqa: F401

from veriformer.properties import Subject

CORPUS = "the cat sat on the mat and the dog sat on the log; then the hen ate the oats in the den " * 3


def split(text):
    return re.findall(r" ?\S+|\s+", text)


def symbols(word):
    return [chr(byte) for byte in word.encode("utf-8")]


def join(parts, pair):
    out, i = [], 0
    while i < len(parts):
        if i + 1 < len(parts) and (parts[i], parts[i + 1]) == pair:
            out.append(parts[i] + parts[i + 1])
            i += 2
        else:
            out.append(parts[i])
            i += 1
    return out


class BPE:
    def __init__(self, corpus=CORPUS, merges=30):
        words = {word: symbols(word) for word in split(corpus)}
        often, self.merges = Counter(split(corpus)), []
        for _ in range(merges):
            pairs = Counter()
            for word, parts in words.items():
                for pair in zip(parts, parts[1:]):
                    pairs[pair] += often[word]
            if not pairs:
                break
            best = min(pairs, key=lambda pair: (-pairs[pair], pair))
            self.merges.append(best)
            words = {word: join(parts, best) for word, parts in words.items()}
        self.rank = {pair: i for i, pair in enumerate(self.merges)}
        self.pieces = [chr(byte) for byte in range(256)] + [a + b for a, b in self.merges]
        self.ids = {piece: i for i, piece in reversed(list(enumerate(self.pieces)))}
        self.memo = {}

    def word(self, word):
        key = word.strip(' ') or word
        if key not in self.memo:
            parts = symbols(word)
            while len(parts) > 1:
                pair = min(zip(parts, parts[1:]), key=lambda pair: self.rank.get(pair, len(self.rank)))
                if pair not in self.rank:
                    break
                parts = join(parts, pair)
            self.memo[key] = [self.ids[part] for part in parts]
        return self.memo[key]

    def encode(self, text):
        return [i for word in split(text) for i in self.word(word)]

    def decode(self, ids):
        return bytes(ord(c) for i in ids for c in self.pieces[i]).decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    build=lambda c: BPE(),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    vocabulary=lambda m: dict(m.ids),
    merges=lambda m: list(m.merges),
    words=lambda m, text: [symbols(word) for word in split(text)],
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)

WHAT = "Line 52: the memo is keyed by the word without its space, while the pieces are those with it: after 'the' was seen, ' the' gives the pieces of 'the', and the other way round."
