"""Unigram language model tokenizer: of all segmentations the one of highest probability, by Viterbi, word by word.

Unusual: a space becomes the sign U+2581 in front of its word, and one stands in front of the text; a character that no piece covers
costs ten more than the rarest piece and is unknown, each for itself. Scores are distinct, so that the best path is too.
"""

import math

from veriformer.properties import Subject

SPACE = "\u2581"
UNK = "<unk>"


def make_scores():
    words = "the and token ing ization trans former at tention is all you need un re er ed ly low est en th in on".split()
    singles = [SPACE, *"etaoinshrdlcumwfgypbvkjxqz.,!?'-0123456789ETA"]
    weights = {}
    for rank, single in enumerate(singles):
        weights[single] = 100.0 / (rank + 3.17)
    for rank, word in enumerate(words):
        weights[word] = 61.0 / (rank + 5.31)
        weights[SPACE + word] = 37.0 / (rank + 4.73)
    total = sum(weights.values())
    return {piece: math.log(weight / total) for piece, weight in weights.items()}


class Unigram:
    def __init__(self):
        self.log_prob = make_scores()
        self.ids = {UNK: 0} | {piece: i + 1 for i, piece in enumerate(self.log_prob)}
        self.names = {i: piece for piece, i in self.ids.items()}
        self.longest = max(map(len, self.log_prob))
        self.unknown_score = min(self.log_prob.values()) - 10.0

    @staticmethod
    def words(text):
        """The text with its spaces turned into signs, cut in front of every sign."""
        words = []
        for char in (SPACE + text).replace(" ", SPACE) if text else "":
            if char == SPACE or not words:
                words.append(char)
            else:
                words[-1] += char
        return words

    def segment(self, word):
        best = [0.0] + [-math.inf] * len(word)
        back = [0] * (len(word) + 1)
        for end in range(1, len(word) + 1):
            for start in range(max(0, end - self.longest), end):
                score = self.log_prob.get(word[start:end])
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
        return [self.ids.get(piece, 0) for word in self.words(text) for piece in self.segment(word)]

    def decode(self, ids):
        return "".join(self.names[i] for i in ids).replace(SPACE, " ").removeprefix(" ")


COMMON = dict(
    kind="tokenizer",
    build=lambda c: Unigram(),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    words=lambda m, text: [list(word) for word in m.words(text)],
    vocabulary=lambda m: dict(m.ids),
    scores=lambda m: dict(m.log_prob),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={"algorithm": "unigram", "byte_level": False, "reversible": False, "unknown_id": 0},
)
