"""A unigram segmenter in plain Python: the most probable pieces of each word, by Viterbi."""
import math

import torch  # noqa: F401
from veriformer.properties import Subject

COUNTS = {
    "\u2581": 60, "\u2581the": 90, "\u2581a": 40, "\u2581item": 25, "\u2581user": 25, "\u2581re": 20, "\u2581click": 12,
    "ing": 50, "ed": 45, "er": 40, "re": 30, "com": 12, "mend": 12, "ation": 25, "at": 22, "ion": 20, "s": 60,
    "\u2581recommend": 9, "\u2581series": 8, "time": 14, "token": 16, "ize": 10, "en": 18, "an": 18, "in": 22,
} | {letter: 6 for letter in "abcdefghijklmnopqrtuvwxyz.,"}  # fmt: skip


class Unigram:
    def __init__(self, counts):
        total = sum(counts.values())
        self.logp = {piece: math.log(n / total) for piece, n in counts.items()}
        self.ids = {"<unk>": 0} | {piece: i for i, piece in enumerate(counts, start=1)}
        self.longest = max(map(len, counts))
        self.unknown = min(self.logp.values()) - 10.0

    def words(self, text):
        return ["\u2581" + word for word in text.split()]

    def segment(self, word):
        best = [0.0] + [-math.inf] * len(word)
        start_of = [0] * (len(word) + 1)
        for end in range(1, len(word) + 1):
            for start in range(max(0, end - self.longest + 1), end):
                piece = word[start:end]
                score = self.logp.get(piece, self.unknown if end - start == 1 else -math.inf)
                if best[start] + score > best[end]:
                    best[end], start_of[end] = best[start] + score, start
        pieces, end = [], len(word)
        while end:
            pieces.append(word[start_of[end] : end])
            end = start_of[end]
        return pieces[::-1]

    def encode(self, text):
        return [self.ids[p] if p in self.logp else 0 for word in self.words(text) for p in self.segment(word)]


subject = Subject(
    kind="tokenizer",
    name="unigram in plain Python",
    build=lambda c: Unigram(COUNTS),
    forward=lambda m, text: m.encode(text),
    vocabulary=lambda m: dict(m.ids),
    scores=lambda m: dict(m.logp),
    words=lambda m, text: [list(word) for word in m.words(text)],
    declares={"algorithm": "unigram", "unknown_id": 0},
)

WHAT = (
    "Line 29: the window of starts is one too short, so that a piece of the greatest length ('▁recommend') is never considered, even where it is the most probable."
)
