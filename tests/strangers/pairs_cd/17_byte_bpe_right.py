"""Byte-level BPE; bytes are written as the characters of Latin-1."""
import re
from collections import Counter

from veriformer.properties import Subject

CORPUS = "banana bandana cabana the theme then these banana papaya mississippi miss hisses the the anagram " * 2


def split(text):
    return [list(w.encode("utf-8").decode("latin-1")) for w in re.findall(r"\s?\S+|\s", text)]


def replace_all(word, pair):
    out, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


class BPE:
    def __init__(self, num_merges=24):
        words = split(CORPUS)
        self.merges = []
        for _ in range(num_merges):
            pairs = Counter(p for w in words for p in zip(w, w[1:]))
            best = min(pairs, key=lambda p: (-pairs[p], p))
            self.merges.append(best)
            words = [replace_all(w, best) for w in words]
        self.vocab = {chr(b): b for b in range(256)}
        for a, b in self.merges:
            self.vocab.setdefault(a + b, len(self.vocab))
        self.pieces = {i: p for p, i in self.vocab.items()}

    def encode(self, text):
        ids = []
        for word in split(text):
            for pair in self.merges:
                word = replace_all(word, pair)
            ids.extend(self.vocab[p] for p in word)
        return ids

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids).encode("latin-1").decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte BPE",
    build=lambda c: BPE(),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    words=lambda model, text: split(text),
    vocabulary=lambda model: model.vocab,
    merges=lambda model: model.merges,
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
