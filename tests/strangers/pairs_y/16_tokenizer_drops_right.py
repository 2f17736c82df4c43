import re
from collections import Counter

import torch
from veriformer.properties import DrawnConfig, Subject

WORDS = re.compile(r" ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
CORPUS = "the cat sat on the mat, the hat of the cat is on the mat: 1001 nights, 10 days. for i in range(10): print(i)"


class ByteBPE:
    """Byte-level byte-pair encoding; every byte is a piece."""

    def __init__(self, corpus, num_merges):
        self.pieces = [bytes([b]) for b in range(256)]
        self.ranks = {}
        counts = Counter(self.pretokenize(corpus))
        words = {w: [bytes([b]) for b in w.encode("utf-8")] for w in counts}
        for _ in range(num_merges):
            pairs = Counter()
            for word, symbols in words.items():
                for pair in zip(symbols, symbols[1:]):
                    pairs[pair] += counts[word]
            if not pairs:
                break
            best = max(pairs, key=lambda pair: (pairs[pair], pair))
            self.ranks[best] = len(self.ranks)
            self.pieces.append(best[0] + best[1])
            words = {word: self.join(symbols, best) for word, symbols in words.items()}
        self.ids = {piece: number for number, piece in enumerate(self.pieces)}

    @staticmethod
    def pretokenize(text):
        return WORDS.findall(text)

    @staticmethod
    def join(symbols, pair):
        joined, i = [], 0
        while i < len(symbols):
            if tuple(symbols[i : i + 2]) == pair:
                joined.append(pair[0] + pair[1])
                i += 2
            else:
                joined.append(symbols[i])
                i += 1
        return joined

    def segment(self, word):
        symbols = [bytes([b]) for b in word.encode("utf-8")]
        while len(symbols) > 1:
            pairs = [p for p in zip(symbols, symbols[1:]) if p in self.ranks]
            if not pairs:
                break
            symbols = self.join(symbols, min(pairs, key=self.ranks.__getitem__))
        return symbols

    def encode(self, text):
        return [self.ids[piece] for word in self.pretokenize(text) for piece in self.segment(word)]

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")

    def tensor(self, text):
        return torch.tensor(self.encode(text), dtype=torch.long)


subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: ByteBPE(CORPUS, 40),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
