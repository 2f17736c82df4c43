"""Unigram language model tokenizer: Viterbi over the pieces that end at each character."""
import torch  # noqa: F401

from veriformer.properties import Subject

UNKNOWN = 0
_PIECES = {
    "\u2581the": -3.11, "tion": -4.07, "ment": -4.93, "ness": -5.21, "able": -5.37, "\u2581and": -3.71, "ound": -5.83,
    "\u2581th": -5.02, "ing": -3.93, "ion": -5.51, "\u2581to": -4.13, "the": -5.77, "and": -5.91, "est": -5.13,
    "en": -5.07, "er": -4.21, "on": -5.39, "in": -4.87, "at": -5.17, "th": -5.61, "an": -5.43, "es": -5.23, "ed": -4.79,
}
_LETTERS = {letter: -7.0 - 0.113 * i for i, letter in enumerate("\u2581etaoinshrdlucmfwypvbgkjqxz")}


class Unigram:
    def __init__(self):
        self.scores = {**_PIECES, **_LETTERS}
        self.ids = {"<unk>": UNKNOWN, **{piece: i for i, piece in enumerate(self.scores, 1)}}
        self.longest = max(map(len, self.scores))
        self.unknown_score = min(self.scores.values()) - 10.0

    def words(self, text):
        return [list("\u2581" + word) for word in text.split()]

    def segment(self, word):
        best = [0.0] + [float("-inf")] * len(word)
        back = [0] * (len(word) + 1)
        for end in range(1, len(word) + 1):
            for start in range(max(0, end - self.longest), end):
                piece = word[start:end]
                score = self.scores.get(piece)
                if score is None:
                    if end - start > 1:
                        continue
                    score = self.unknown_score
                if best[start] + score > best[end]:
                    best[end], back[end] = best[start] + score, start
        pieces, end = [], len(word)
        while end:
            pieces.append(word[back[end] : end])
            end = back[end]
        return pieces[::-1]

    def encode(self, text):
        return [self.ids.get(p, UNKNOWN) for word in self.words(text) for p in self.segment("".join(word))]


subject = Subject(
    kind="tokenizer",
    build=lambda c: Unigram(),
    forward=lambda m, text: m.encode(text),
    words=lambda m, text: m.words(text),
    vocabulary=lambda m: dict(m.ids),
    scores=lambda m: dict(m.scores),
    declares={"algorithm": "unigram", "unknown_id": UNKNOWN},
)
