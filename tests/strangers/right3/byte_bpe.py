"""A byte-level BPE tokenizer trained on one sentence, pieces written as latin-1 text."""
from veriformer.properties import Subject

from collections import Counter
from functools import reduce
CORPUS = "the cat sat on the mat and the other cat then sat on that hat " * 3

def words(text):
    out = [""]
    for ch in text.encode("utf-8").decode("latin-1"):
        out.append(ch) if ch == " " else out.__setitem__(-1, out[-1] + ch)
    return [list(w) for w in out if w]

def fuse(w, pair):
    i, out = 0, []
    while i < len(w):
        hit = tuple(w[i : i + 2]) == pair
        out.append(w[i] + w[i + 1] if hit else w[i])
        i += 2 if hit else 1
    return out

class BPE:
    def __init__(self, n=12):
        self.merges, corpus = [], words(CORPUS)
        for _ in range(n):
            counts = Counter(p for w in corpus for p in zip(w, w[1:]))
            self.merges.append(min(counts, key=lambda p: (-counts[p], p)))
            corpus = [fuse(w, self.merges[-1]) for w in corpus]
        self.pieces = [chr(i) for i in range(256)] + [a + b for a, b in self.merges]
        self.vocab = {p: i for i, p in enumerate(self.pieces)}

    def encode(self, text):
        out = []
        for w in words(text):
            out += [self.vocab[p] for p in reduce(fuse, self.merges, w)]
        return out

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids).encode("latin-1").decode("utf-8", errors="replace")

common = dict(kind="tokenizer", build=lambda c: BPE(), forward=lambda m, text: m.encode(text), decode=lambda m, ids: m.decode(ids),
    vocabulary=lambda m: m.vocab, merges=lambda m: m.merges)
undeclared = Subject(**common)
declared = Subject(**common, declares={"algorithm": "bpe", "byte_level": True, "reversible": True})
