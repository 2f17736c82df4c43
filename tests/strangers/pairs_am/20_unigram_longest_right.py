import math
import re

from veriformer.properties import Subject

COUNTS = {
    "\u2581": 40, "\u2581the": 90, "\u2581model": 30, "\u2581to": 35, "\u2581atten": 6, "\u2581attend": 12,
    "tion": 25, "ing": 28, "ed": 20, "er": 22, "s": 60, "token": 9, "\u2581token": 14, "the": 8, "low": 7,
    "new": 6, "est": 9, "ab": 4, "abc": 3,
    **{c: 5 for c in "abcdefghijklmnopqrtuvwxyz"},
}


class Unigram:
    """SentencePiece's unigram model: the most probable segmentation of every word."""

    def __init__(self, counts):
        total = sum(counts.values())
        self.logp = {p: math.log(n / total) for p, n in counts.items()}
        self.vocab = {"<unk>": 0, **{p: i for i, p in enumerate(counts, 1)}}
        self.longest = max(map(len, counts))
        self.unk_score = min(self.logp.values()) - 10.0

    def words(self, text):
        return re.findall("\u2581[^\u2581]*", "\u2581" + text.replace(" ", "\u2581"))

    def segment(self, word):
        best = [0.0] + [-math.inf] * len(word)
        back = [0] * (len(word) + 1)
        for end in range(1, len(word) + 1):
            for start in range(max(0, end - self.longest), end):
                piece = word[start:end]
                score = self.logp.get(piece)
                if score is None:
                    if end - start > 1:
                        continue
                    score = self.unk_score
                if best[start] + score > best[end]:
                    best[end], back[end] = best[start] + score, start
        pieces, end = [], len(word)
        while end > 0:
            pieces.append(word[back[end] : end])
            end = back[end]
        return pieces[::-1]

    def encode(self, text):
        return [self.vocab.get(p, 0) for w in self.words(text) for p in self.segment(w)]


subject = Subject(
    kind="tokenizer",
    name="unigram tokenizer",
    build=lambda c: Unigram(COUNTS),
    forward=lambda m, text: m.encode(text),
    words=lambda m, text: [list(w) for w in m.words(text)],
    vocabulary=lambda m: dict(m.vocab),
    scores=lambda m: dict(m.logp),
    declares={"algorithm": "unigram", "byte_level": False, "unknown_id": 0},
)
