"""Byte-level BPE after GPT-2's encoder.py, with a small vocabulary learnt from a few lines."""

import re
from collections import Counter

from veriformer.properties import Subject

CORPUS = """the lower the newer the wider the lowest the newest the widest
she sells sea shells by the sea shore, the shells she sells are sea shells
a low slow flow of the newer river, lower and slower than the older river"""
PATTERN = re.compile(r" ?\w+| ?[^\w\s]+|\s+")


def bytes_to_unicode():
    """Every byte as a character that can be printed."""
    bs = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    cs = bs[:]
    for b in range(256):
        if b not in bs:
            bs.append(b)
            cs.append(256 + len(bs) - 189)
    return {b: chr(c) for b, c in zip(bs, cs)}


BYTES = bytes_to_unicode()


def merge(symbols, pair):
    merged, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            merged.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            merged.append(symbols[i])
            i += 1
    return merged


class Encoder:
    def __init__(self, corpus=CORPUS, num_merges=40):
        self.byte_decoder = {c: b for b, c in BYTES.items()}
        self.merges = self.learn(corpus, num_merges)
        self.bpe_ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        pieces = [*BYTES.values(), *("".join(pair) for pair in self.merges)]
        self.encoder = {piece: i for i, piece in enumerate(pieces)}
        self.decoder = {i: piece for piece, i in self.encoder.items()}
        self.cache = {}

    def split(self, text):
        return ["".join(BYTES[b] for b in word.encode("utf-8")) for word in PATTERN.findall(text)]

    def learn(self, corpus, num_merges):
        counts = Counter(self.split(corpus))
        words = {word: list(word) for word in counts}
        merges = []
        for _ in range(num_merges):
            pairs = Counter()
            for word, symbols in words.items():
                for pair in zip(symbols, symbols[1:]):
                    pairs[pair] += counts[word]
            if not pairs:
                break
            best = max(pairs, key=lambda pair: (pairs[pair], pair))
            merges.append(best)
            words = {word: merge(symbols, best) for word, symbols in words.items()}
        return merges

    def bpe(self, word):
        """The ids of one word; remembered, since few words make most of a text."""
        if word not in self.cache:
            symbols = list(word)
            while len(symbols) > 1:
                best = min(zip(symbols, symbols[1:]), key=lambda pair: self.bpe_ranks.get(pair, float("inf")))
                if best not in self.bpe_ranks:
                    break
                symbols = merge(symbols, best)
            self.cache[word] = [self.encoder[symbol] for symbol in symbols]
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
        text = "".join(self.decoder[i] for i in ids)
        return bytes(self.byte_decoder[c] for c in text).decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: Encoder(),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    words=lambda model, text: [list(word) for word in model.split(text)],
    vocabulary=lambda model: dict(model.encoder),
    merges=lambda model: list(model.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
