WHAT = "Viterbi starts one letter late: pieces of the greatest length are never tried, so the segmentation is not the most probable one, line 35."
"""Unigram language model tokenizer: the most probable segmentation of every word."""

import math

from veriformer.properties import Subject

UNKNOWN = "<unk>"
COUNTS = {
    "▁": 900, "e": 310, "t": 290, "a": 270, "o": 250, "n": 230, "i": 220, "r": 205, "s": 200, "h": 150,
    "d": 140, "l": 135, "u": 110, "c": 105, "m": 90, "f": 75, "g": 70, "p": 65, "w": 60, "y": 50,
    "b": 45, "v": 40, "k": 30,
    "th": 180, "er": 170, "in": 160, "on": 130, "an": 125, "re": 118, "ed": 95, "ing": 128, "▁t": 148, "▁s": 122,
    "▁the": 400, "▁and": 260, "▁of": 240, "est": 84, "low": 52, "▁low": 58, "ness": 43, "▁sea": 36,
    "tion": 112, "ation": 76, "▁cat": 33, "shell": 24, "▁sell": 22, "▁then": 41, "other": 37, "▁with": 92,
}  # fmt: skip


class Unigram:
    def __init__(self, counts):
        total = sum(counts.values())
        self.logp = {piece: math.log(n / total) for piece, n in counts.items()}
        self.ids = {UNKNOWN: 0} | {piece: i for i, piece in enumerate(self.logp, 1)}
        self.texts = {i: piece for piece, i in self.ids.items()}
        self.longest = max(map(len, self.logp))
        self.penalty = min(self.logp.values()) - 10.0

    def words(self, text):
        return ["▁" + word for word in text.split()]

    def segment(self, word):
        best = [0.0] + [-math.inf] * len(word)
        back = [0] * (len(word) + 1)
        for end in range(1, len(word) + 1):
            for start in range(max(0, end - self.longest + 1), end):
                score = self.logp.get(word[start:end])
                if score is None:
                    if end - start > 1:
                        continue
                    score = self.penalty
                if best[start] + score > best[end]:
                    best[end], back[end] = best[start] + score, start
        pieces, end = [], len(word)
        while end > 0:
            pieces.append(word[back[end] : end])
            end = back[end]
        return pieces[::-1]

    def encode(self, text):
        return [self.ids.get(piece, 0) for word in self.words(text) for piece in self.segment(word)]

    def decode(self, ids):
        return "".join(self.texts[i] for i in ids).replace("▁", " ").strip()


subject = Subject(
    kind="tokenizer",
    name="unigram",
    build=lambda c: Unigram(COUNTS),
    forward=lambda tokenizer, text: tokenizer.encode(text),
    decode=lambda tokenizer, ids: tokenizer.decode(ids),
    words=lambda tokenizer, text: [list(word) for word in tokenizer.words(text)],
    vocabulary=lambda tokenizer: dict(tokenizer.ids),
    scores=lambda tokenizer: dict(tokenizer.logp),
    declares={"algorithm": "unigram", "unknown_id": 0},
)
