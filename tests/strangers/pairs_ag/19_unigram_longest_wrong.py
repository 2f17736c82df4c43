WHAT = 'The Viterbi search of the unigram tokenizer begins one character too late (line 35: `end - self.longest + 1`), so that pieces of the greatest length are never considered and the segmentation is not the most probable one.'
"""Unigram language model tokenizer (SentencePiece): the segmentation of highest log probability."""
import math

from veriformer.properties import Subject

SPACE = "\u2581"
UNK = "<unk>"
COUNTS = {
    SPACE: 300, SPACE + "the": 240, SPACE + "and": 150, SPACE + "of": 140, SPACE + "to": 130, SPACE + "a": 120, "s": 90, "e": 60,
    "ing": 85, "tion": 80, "ment": 60, "er": 70, "ed": 66, "ly": 40, "th": 34, "in": 44, "on": 41, "an": 39, "re": 37, "at": 35,
    "able": 25, "ness": 23, SPACE + "for": 55, SPACE + "was": 45, SPACE + "wit": 31, "est": 29, "a": 28, "t": 27, "o": 26, "i": 24,
    "n": 22, "r": 21, "l": 20, "d": 19, "h": 18, "c": 17, "u": 16, "m": 15, "p": 14, "f": 13, "g": 12, "b": 11, "y": 10, "w": 9,
    "v": 8, "k": 7, "x": 4, "j": 3, "q": 2, "z": 2, ".": 6, ",": 6,
}


class Unigram:
    def __init__(self, counts):
        total = sum(counts.values())
        self.scores = {piece: math.log(count / total) for piece, count in counts.items()}
        self.ids = {UNK: 0, **{piece: i for i, piece in enumerate(counts, 1)}}
        self.pieces = {i: piece for piece, i in self.ids.items()}
        self.longest = max(map(len, counts))
        self.unk_score = min(self.scores.values()) - 10.0

    def words(self, text):
        """Each word with the mark of the space in front of it."""
        return [SPACE + word for word in text.split(" ")] if text else []

    def segment(self, word):
        best = [0.0] + [-math.inf] * len(word)
        back = [0] * (len(word) + 1)
        for end in range(1, len(word) + 1):
            for start in range(max(0, end - self.longest + 1), end):
                score = self.scores.get(word[start:end])
                if score is None and end - start == 1:
                    score = self.unk_score
                if score is not None and best[start] + score > best[end]:
                    best[end], back[end] = best[start] + score, start
        out, end = [], len(word)
        while end:
            out.append(word[back[end]:end])
            end = back[end]
        return out[::-1]

    def encode(self, text):
        return [self.ids.get(piece, 0) for word in self.words(text) for piece in self.segment(word)]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids).replace(SPACE, " ")[1:]


subject = Subject(
    kind="tokenizer",
    name="unigram",
    build=lambda c: Unigram(COUNTS),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    words=lambda m, text: [list(word) for word in m.words(text)],
    vocabulary=lambda m: dict(m.ids),
    scores=lambda m: dict(m.scores),
    declares={"algorithm": "unigram", "unknown_id": 0, "byte_level": False, "reversible": False},
)
