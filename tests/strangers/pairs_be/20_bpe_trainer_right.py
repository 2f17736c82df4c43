"""Byte-level BPE, trained on words and their frequencies (Sennrich et al.'s learn_bpe, GPT-2's pieces)."""

import re
from collections import Counter

from veriformer.properties import Subject

# A word takes the space before it along; nothing of a text is lost.
PATTERN = re.compile(r" ?\S+|\s+")
CORPUS = [
    "the cat sat on the mat and the rat sat on the hat",
    "low low low low low lower lower newest newest newest newest newest newest widest widest widest",
    "attention is all you need, and attention to the mask is what you need most",
]


def split(text):
    """Words as tuples of bytes, a byte written as the letter of its number."""
    return [tuple(word.encode("utf-8").decode("latin-1")) for word in PATTERN.findall(text)]


def merge(symbols, pair):
    merged, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            merged.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            merged.append(symbols[i])
            i += 1
    return tuple(merged)


def get_stats(vocab):
    """How often each pair of neighbours occurs in the corpus."""
    stats = Counter()
    for symbols, freq in vocab.items():
        for pair in zip(symbols, symbols[1:]):
            stats[pair] += freq
    return stats


class BPE:
    def __init__(self, merges):
        self.merges = merges
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        pieces = [chr(b) for b in range(256)]
        for a, b in merges:
            if a + b not in pieces:
                pieces.append(a + b)
        self.pieces = pieces
        self.vocab = {piece: i for i, piece in enumerate(pieces)}

    @classmethod
    def train(cls, texts, vocab_size):
        words = Counter(word for text in texts for word in split(text))
        merges, pieces = [], {chr(b) for b in range(256)}
        while len(pieces) < vocab_size:
            stats = get_stats(words)
            if not stats:
                break
            best = max(stats, key=stats.get)
            merges.append(best)
            pieces.add(best[0] + best[1])
            remerged = Counter()
            for symbols, freq in words.items():
                remerged[merge(symbols, best)] += freq
            words = remerged
        return cls(merges)

    def segment(self, symbols):
        while len(symbols) > 1:
            best = min(zip(symbols, symbols[1:]), key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            symbols = merge(symbols, best)
        return symbols

    def encode(self, text):
        return [self.vocab[piece] for word in split(text) for piece in self.segment(word)]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids).encode("latin-1").decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: BPE.train(CORPUS, 300),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    train=lambda texts, vocab_size: BPE.train(texts, vocab_size),
    words=lambda m, text: [list(word) for word in split(text)],
    vocabulary=lambda m: dict(m.vocab),
    merges=lambda m: list(m.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
