"""Byte-level BPE, learnt from a few lines when the tokenizer is made."""

import re
from collections import Counter

from veriformer.properties import Subject

CORPUS = "the cat sat on the mat, the other cat sat there; that is the thing. naïve café, über allem. 3.14 and 2.71 " * 2
WORDS = re.compile(r" ?\S+|\s")


def fuse(word, pair):
    out, i = [], 0
    while i < len(word):
        if tuple(word[i : i + 2]) == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


class ByteBPE:
    def __init__(self, num_merges=40):
        words = Counter(WORDS.findall(CORPUS))
        split = {w: [bytes([b]) for b in w.encode()] for w in words}
        self.merges = []
        for _ in range(num_merges):
            pairs = Counter()
            for w, pieces in split.items():
                for pair in zip(pieces, pieces[1:]):
                    pairs[pair] += words[w]
            if not pairs:
                break
            best = max(pairs, key=lambda p: (pairs[p], p))
            self.merges.append(best)
            split = {w: fuse(pieces, best) for w, pieces in split.items()}
        self.pieces = [bytes([b]) for b in range(256)]
        self.pieces += [p for p in dict.fromkeys(a + b for a, b in self.merges)]
        self.ids = {p: i for i, p in enumerate(self.pieces)}
        self.rank = {pair: i for i, pair in enumerate(self.merges)}

    def encode(self, text):
        ids = []
        for word in WORDS.findall(text):
            pieces = [bytes([b]) for b in word.encode()]
            while len(pieces) > 1:
                pair = min(zip(pieces, pieces[1:]), key=lambda p: self.rank.get(p, len(self.rank)))
                if pair not in self.rank:
                    break
                pieces = fuse(pieces, pair)
            ids += [self.ids[p] for p in pieces]
        return ids

    def decode(self, ids):
        return "".join(self.pieces[i].decode("utf-8", errors="replace") for i in ids)


subject = Subject(
    kind="tokenizer",
    build=lambda c: ByteBPE(),
    forward=lambda tok, text: tok.encode(text),
    decode=lambda tok, ids: tok.decode(ids),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)

WHAT = "Line 57: pieces are decoded one by one, so that a character whose bytes lie in several pieces becomes replacement characters."
