"""Unigram segmentation: for every word the most probable sequence of pieces, by dynamic programming."""

import math

from veriformer.properties import Subject

COUNTS = {
    "▁": 40, "a": 20, "b": 6, "c": 9, "d": 10, "e": 40, "f": 8, "g": 7, "h": 18, "i": 21, "k": 5, "l": 13, "m": 9,
    "n": 22, "o": 24, "p": 6, "r": 20, "s": 22, "t": 30, "u": 10, "v": 4, "w": 7, "y": 6,
    "th": 12, "he": 11, "in": 12, "er": 11, "an": 9, "re": 7, "on": 8, "at": 7, "en": 9, "or": 7, "is": 6,
    "▁the": 60, "▁a": 30, "▁of": 25, "▁and": 28, "▁in": 20, "▁to": 22,
    "ing": 30, "tion": 26, "ent": 12, "ers": 10, "less": 6,
    "▁atten": 9, "▁token": 14, "▁model": 16, "▁train": 11, "former": 9, "tions": 9, "▁trans": 8,
    "▁attention": 18, "▁training": 12, "▁tokenize": 7, "▁position": 9, "▁gradient": 8,
}  # fmt: skip
UNKNOWN = "<unk>"
UNKNOWN_ID = 0


class Unigram:
    def __init__(self, counts):
        total = sum(counts.values())
        self.score = {piece: math.log(count / total) for piece, count in counts.items()}
        self.vocab = {UNKNOWN: UNKNOWN_ID, **{piece: i for i, piece in enumerate(counts, start=1)}}
        self.longest = max(len(piece) for piece in counts)
        self.penalty = min(self.score.values()) - 10.0

    def words(self, text):
        return ["▁" + word for word in text.split()]

    def segment(self, word):
        """The pieces of the best path to the end; a letter that no piece covers is unknown, at a price."""
        best = [0.0] + [-math.inf] * len(word)
        back = [0] * (len(word) + 1)
        for end in range(1, len(word) + 1):
            for start in range(max(0, end - self.longest), end):
                piece = word[start:end]
                if piece in self.score:
                    score = self.score[piece]
                elif end - start == 1:
                    score = self.penalty
                else:
                    continue
                if best[start] + score > best[end]:
                    best[end], back[end] = best[start] + score, start
        pieces, end = [], len(word)
        while end > 0:
            pieces.append(word[back[end] : end])
            end = back[end]
        return pieces[::-1]

    def encode(self, text):
        return [self.vocab.get(piece, UNKNOWN_ID) for word in self.words(text) for piece in self.segment(word)]

    def decode(self, ids):
        names = {i: piece for piece, i in self.vocab.items()}
        return "".join(names[i] for i in ids).replace("▁", " ").strip()


subject = Subject(
    kind="tokenizer",
    name="unigram",
    build=lambda c: Unigram(COUNTS),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    words=lambda m, text: [list(word) for word in m.words(text)],
    vocabulary=lambda m: dict(m.vocab),
    scores=lambda m: dict(m.score),
    declares={"algorithm": "unigram", "unknown_id": UNKNOWN_ID, "byte_level": False, "reversible": False},
)
