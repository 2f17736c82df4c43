"""A unigram tokenizer, after SentencePiece: the most probable segmentation of every word, by Viterbi."""

import math
import string

from veriformer.properties import Subject

SPACE = "\u2581"
COUNTS = {SPACE: 400, **{c: 20 + 3 * i for i, c in enumerate(string.ascii_lowercase)}}
COUNTS.update({c: 9 for c in string.ascii_uppercase + string.digits + string.punctuation})
COUNTS.update(
    {
        SPACE + "the": 500,
        SPACE + "a": 300,
        SPACE + "to": 150,
        SPACE + "token": 60,
        SPACE + "trans": 40,
        SPACE + "un": 45,
        SPACE + "attention": 35,
        "former": 30,
        "ization": 25,
        "ize": 40,
        "er": 130,
        "en": 90,
        "ing": 160,
        "in": 110,
        "at": 75,
        "on": 120,
        "tion": 70,
        "ed": 105,
        "th": 66,
        "he": 77,
        "qu": 22,
        "ick": 18,
    }
)


class Unigram:
    def __init__(self, counts):
        total = sum(counts.values())
        self.unk_id = 0
        self.pieces = ["<unk>", *counts]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        self.log_probs = {piece: math.log(count / total) for piece, count in counts.items()}
        self.max_piece_length = max(len(piece) for piece in counts)
        self.unk_score = min(self.log_probs.values()) - 10.0

    def pretokenize(self, text):
        return [SPACE + word for word in text.split()]

    def segment(self, word):
        n = len(word)
        best = [0.0] + [-math.inf] * n
        back = [None] * (n + 1)
        for end in range(1, n + 1):
            for start in range(max(0, end - self.max_piece_length + 1), end):
                piece = word[start:end]
                score = self.log_probs.get(piece)
                if score is None:
                    if end - start > 1:
                        continue
                    score = self.unk_score
                if best[start] + score > best[end]:
                    best[end] = best[start] + score
                    back[end] = start
        pieces = []
        end = n
        while end > 0:
            start = back[end]
            pieces.append(word[start:end])
            end = start
        return pieces[::-1]

    def encode(self, text):
        return [self.ids.get(piece, self.unk_id) for word in self.pretokenize(text) for piece in self.segment(word)]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids).replace(SPACE, " ").strip()


subject = Subject(
    kind="tokenizer",
    name="unigram",
    build=lambda c: Unigram(COUNTS),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    words=lambda model, text: [list(word) for word in model.pretokenize(text)],
    vocabulary=lambda model: dict(model.ids),
    scores=lambda model: dict(model.log_probs),
    declares={"algorithm": "unigram", "byte_level": False, "reversible": False, "unknown_id": 0},
)
