WHAT = "Viterbi's window starts one too late, so pieces of the greatest length are never tried and a less probable segmentation is returned (line 42)"
"""Unigram segmentation (SentencePiece's second model): Viterbi over the pieces of a word."""

import math
from collections import Counter

from veriformer.properties import Subject

UNK = 0
TEXT = """speech recognition needs speech and recognition needs patience the recommender recommends what recommenders
recommend and the transformer transforms what transformers transform patience is recognition of what needs time
time series transform into series of speech tokens and tokens transform into time"""


def pieces_of(text, longest=8, size=160):
    """Frequent substrings with log probabilities, and every character."""
    words = ["▁" + w for w in text.split()]
    counts = Counter(w[i : i + n] for w in words for n in range(1, longest + 1) for i in range(len(w) - n + 1))
    chars = {p: c for p, c in counts.items() if len(p) == 1}
    long = sorted((p for p in counts if len(p) > 1 and counts[p] > 1), key=lambda p: (-counts[p] * len(p), p))
    kept = {**chars, **{p: counts[p] for p in long[:size]}}
    total = sum(kept.values())
    return {p: math.log(c / total) for p, c in kept.items()}


class Unigram:
    def __init__(self, log_prob):
        self.log_prob = dict(log_prob)
        self.ids = {"<unk>": UNK, **{p: i + 1 for i, p in enumerate(self.log_prob)}}
        self.longest = max(map(len, self.log_prob))
        self.unk_score = min(self.log_prob.values()) - 10.0

    @staticmethod
    def words(text):
        return ["▁" + w for w in text.split()]

    def segment(self, word):
        size = len(word)
        best = [0.0] + [-math.inf] * size
        back = [0] * (size + 1)
        for end in range(1, size + 1):
            for start in range(max(0, end - self.longest + 1), end):
                piece = word[start:end]
                score = self.log_prob.get(piece)
                if score is None:
                    if end - start > 1:
                        continue
                    score = self.unk_score
                if best[start] + score > best[end]:
                    best[end], back[end] = best[start] + score, start
        pieces, end = [], size
        while end:
            pieces.append(word[back[end] : end])
            end = back[end]
        return pieces[::-1]

    def encode(self, text):
        return [self.ids.get(p, UNK) for w in self.words(text) for p in self.segment(w)]


subject = Subject(
    kind="tokenizer",
    name="unigram",
    build=lambda c: Unigram(pieces_of(TEXT)),
    forward=lambda model, text: model.encode(text),
    words=lambda model, text: [list(w) for w in model.words(text)],
    vocabulary=lambda model: dict(model.ids),
    scores=lambda model: dict(model.log_prob),
    declares={"algorithm": "unigram", "byte_level": False, "unknown_id": UNK},
)
