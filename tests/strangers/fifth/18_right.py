"""Byte-level BPE, in the style of GPT-2's encoder.py, with its training."""

import re
from collections import Counter
from functools import lru_cache

from veriformer.properties import Subject

CORPUS = [
    "the quick brown fox jumps over the lazy dog; the dog sleeps, the fox does not.",
    "low lower lowest, new newer newest, wide wider widest: words that share their stems.",
    "a transformer attends to tokens, and tokens are what a tokenizer makes of a text.",
    "in 2017 attention was all you need; in 2018 it was trained on more text than before.",
]


@lru_cache
def bytes_to_unicode():
    """A printable character for every byte."""
    bs = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    cs = bs[:]
    n = 0
    for b in range(256):
        if b not in bs:
            bs.append(b)
            cs.append(256 + n)
            n += 1
    return dict(zip(bs, map(chr, cs)))


def get_pairs(word):
    return list(zip(word, word[1:]))


def merge_pair(word, pair):
    first, second = pair
    merged, i = [], 0
    while i < len(word):
        if i < len(word) - 1 and word[i] == first and word[i + 1] == second:
            merged.append(first + second)
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return tuple(merged)


class Encoder:
    pat = re.compile(r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+")

    def __init__(self, merges):
        self.byte_encoder = bytes_to_unicode()
        self.byte_decoder = {v: k for k, v in self.byte_encoder.items()}
        pieces = [*self.byte_encoder.values(), *(a + b for a, b in merges)]
        self.encoder = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
        self.decoder = {i: piece for piece, i in self.encoder.items()}
        self.merges = list(merges)
        self.bpe_ranks = {pair: rank for rank, pair in enumerate(merges)}

    @classmethod
    def split(cls, text):
        table = bytes_to_unicode()
        return [tuple(table[b] for b in token.encode("utf-8")) for token in cls.pat.findall(text)]

    @classmethod
    def train(cls, texts, vocab_size):
        vocab = Counter(word for text in texts for word in cls.split(text))
        merges = []
        seen = set(bytes_to_unicode().values())
        while len(seen) < vocab_size:
            stats = Counter()
            for word, freq in vocab.items():
                for pair in get_pairs(word):
                    stats[pair] += freq
            if not stats:
                break
            best = max(stats, key=lambda pair: stats[pair])
            merges.append(best)
            seen.add(best[0] + best[1])
            merged = Counter()
            for word, freq in vocab.items():
                merged[merge_pair(word, best)] += freq
            vocab = merged
        return cls(merges)

    def bpe(self, word):
        while len(word) > 1:
            bigram = min(get_pairs(word), key=lambda pair: self.bpe_ranks.get(pair, float("inf")))
            if bigram not in self.bpe_ranks:
                break
            word = merge_pair(word, bigram)
        return word

    def encode(self, text):
        return [self.encoder[piece] for word in self.split(text) for piece in self.bpe(word)]

    def decode(self, ids):
        text = "".join(self.decoder[i] for i in ids)
        return bytes(self.byte_decoder[c] for c in text).decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: Encoder.train(CORPUS, 320),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    train=lambda texts, vocab_size: Encoder.train(texts, vocab_size),
    words=lambda model, text: [list(word) for word in model.split(text)],
    vocabulary=lambda model: dict(model.encoder),
    merges=lambda model: list(model.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
