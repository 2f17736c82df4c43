"""A unigram tokenizer as SentencePiece has it: the segmentation of the highest score, by Viterbi."""
import torch

from veriformer.properties import Subject

PIECES = {
    "\u2581": -3.1, "e": -3.3, "t": -3.45, "a": -3.5, "n": -3.62, "i": -3.7, "o": -3.81, "s": -3.94, "r": -4.02, "d": -4.4,
    "h": -4.41, "l": -4.5, "c": -4.63, "u": -4.72, "m": -4.83, "p": -4.9, "g": -5.03, "k": -5.2, "b": -5.31, "f": -5.4,
    "w": -5.52, "y": -5.6, "v": -5.73, "x": -6.1, "q": -6.6, "j": -6.73, "z": -6.9, "en": -4.95, "in": -4.7, "on": -4.87,
    "at": -4.91, "er": -4.66, "\u2581a": -4.2, "\u2581t": -4.37, "ing": -5.07, "tok": -6.17, "the": -4.11, "\u2581the": -3.97,
    "tion": -5.21, "atten": -6.37, "token": -5.71, "\u2581token": -5.83,
}


class Unigram:
    def __init__(self, scores):
        self.scores = dict(scores)
        self.ids = {"<unk>": 0} | {piece: i + 1 for i, piece in enumerate(scores)}
        self.pieces = {i: piece for piece, i in self.ids.items()}
        self.longest = max(map(len, scores))
        self.unknown = min(scores.values()) - 10.0

    def segment(self, text):
        best, back = [0.0] + [float("-inf")] * len(text), [0] * (len(text) + 1)
        for end in range(1, len(text) + 1):
            for start in range(max(0, end - self.longest + 1), end):
                piece = text[start:end]
                score = self.scores.get(piece)
                if score is None:
                    if len(piece) > 1:
                        continue
                    score = self.unknown
                if best[start] + score > best[end]:
                    best[end], back[end] = best[start] + score, start
        pieces, end = [], len(text)
        while end > 0:
            pieces.append(text[back[end] : end])
            end = back[end]
        return pieces[::-1]

    def encode(self, text):
        return [self.ids.get(piece, 0) for piece in self.segment(text.replace(" ", "\u2581"))]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids).replace("\u2581", " ")


tokenizer = Unigram(PIECES)

subject = Subject(
    kind="tokenizer",
    name="unigram",
    forward=lambda model, text: tokenizer.encode(text),
    decode=lambda model, ids: tokenizer.decode(ids),
    words=lambda model, text: [list(text.replace(" ", "\u2581"))],
    vocabulary=lambda model: dict(tokenizer.ids),
    scores=lambda model: dict(tokenizer.scores),
    declares={"algorithm": "unigram", "unknown_id": 0},
)

WHAT = (
    'The window of candidate starts is one short (line 26): pieces of the greatest length are never tried, so text that should be one of them is cut into shorter ones.'
)
