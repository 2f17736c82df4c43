WHAT = "Training counts a pair once per distinct word instead of as often as the word occurs, so other pairs are merged first (line 41)"
"""Byte-pair encoding in the manner of Sennrich et al., over words that keep their leading space."""
import re
from collections import Counter

from veriformer.properties import Subject

CORPUS = ["low low low low low lower lower newest newest newest newest newest newest widest widest widest"] * 2
PATTERN = re.compile(r" ?\S+|\s")


class BPE:
    def __init__(self, pieces, merges):
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        self.pieces = pieces
        self.merges = merges
        self.ranks = {pair: r for r, pair in enumerate(merges)}

    @staticmethod
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

    @classmethod
    def train(cls, texts, vocab_size):
        frequency = Counter(w for text in texts for w in PATTERN.findall(text))
        pieces = ["<unk>"] + sorted({ch for w in frequency for ch in w})
        splits = {w: list(w) for w in frequency}
        merges = []
        while len(pieces) < vocab_size:
            counts = Counter()
            for word, symbols in splits.items():
                for pair in zip(symbols, symbols[1:]):
                    counts[pair] += 1
            if not counts:
                break
            best = min(counts, key=lambda p: (-counts[p], p))
            merges.append(best)
            if "".join(best) not in pieces:
                pieces.append("".join(best))
            splits = {w: cls.merge(s, best) for w, s in splits.items()}
        return cls(pieces, merges)

    def words(self, text):
        return [list(w) for w in PATTERN.findall(text)]

    def encode(self, text):
        out = []
        for symbols in self.words(text):
            while len(symbols) > 1:
                pair = min(zip(symbols, symbols[1:]), key=lambda p: self.ranks.get(p, float("inf")))
                if pair not in self.ranks:
                    break
                symbols = self.merge(symbols, pair)
            out.extend(self.ids.get(s, 0) for s in symbols)
        return out

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)


subject = Subject(
    kind="tokenizer",
    name="bpe",
    build=lambda c: BPE.train(CORPUS, 30),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    train=lambda texts, vocab_size: BPE.train(texts, vocab_size),
    words=lambda m, text: m.words(text),
    vocabulary=lambda m: dict(m.ids),
    merges=lambda m: list(m.merges),
    declares={"algorithm": "bpe", "byte_level": False, "unknown_id": 0},
)
