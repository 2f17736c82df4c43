"""A unigram tokenizer for product codes: the best segmentation by Viterbi; what no piece covers is <unk>, a letter each."""

import torch  # noqa: F401
from veriformer.properties import Subject

PIECES = {
    " ": -2.5,
    "a": -4.0,
    "b": -4.2,
    "c": -4.4,
    "d": -4.6,
    "e": -3.6,
    "f": -5.1,
    "g": -5.0,
    "h": -4.9,
    "i": -4.1,
    "l": -4.3,
    "n": -4.05,
    "o": -4.15,
    "r": -4.25,
    "s": -3.9,
    "t": -3.8,
    "u": -4.7,
    "th": -4.45,
    "he": -4.55,
    "in": -4.65,
    "er": -4.75,
    "an": -4.85,
    "the": -3.3,
    "ing": -3.7,
    "and": -3.5,
    "tion": -5.3,
    "encod": -6.1,
    "sunlight": -7.3,
}
UNKNOWN = "<unk>"
IDS = {UNKNOWN: 0} | {piece: i for i, piece in enumerate(PIECES, 1)}
LONGEST = max(map(len, PIECES))
PENALTY = min(PIECES.values()) - 10.0


def encode(text):
    best, back = [0.0] + [float("-inf")] * len(text), [None] * (len(text) + 1)
    for end in range(1, len(text) + 1):
        for start in range(max(0, end - LONGEST + 1), end):
            piece = text[start:end]
            if piece in PIECES:
                score = best[start] + PIECES[piece]
            elif end - start == 1:
                score = best[start] + PENALTY
            else:
                continue
            if score > best[end]:
                best[end], back[end] = score, start
    ids, end = [], len(text)
    while end > 0:
        ids.append(IDS.get(text[back[end] : end], 0))
        end = back[end]
    return ids[::-1]


subject = Subject(
    kind="tokenizer",
    name="unigram",
    forward=lambda model, text: encode(text),
    vocabulary=lambda model: dict(IDS),
    scores=lambda model: dict(PIECES),
    declares={"algorithm": "unigram", "unknown_id": 0},
)

WHAT = 'The search looks back LONGEST - 1 letters, one too few (line 45): pieces of the greatest length are never found, and the segmentation is not the best.'
