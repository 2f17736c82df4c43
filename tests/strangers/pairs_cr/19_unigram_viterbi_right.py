"""A unigram tokenizer (Kudo 2018): each word is cut into the pieces whose log probabilities have the largest sum."""
import math
import re

import torch  # noqa: F401
from veriformer.properties import Subject

SPACE, UNK = "\u2581", 0
LONG = {SPACE + "the": -2.13, SPACE + "trans": -3.71, "form": -3.37, "ers": -3.53, SPACE + "a": -2.91, "at": -3.07,
        "tention": -3.97, "ention": -4.61, "er": -2.71, "in": -2.77, "ing": -2.99, "th": -3.19, "an": -3.23, "he": -3.29, "re": -3.41,
        "on": -3.43, "en": -3.47, "nd": -3.59, "ab": -3.61, "abc": -3.83, SPACE + "is": -3.01, "or": -3.67}
LETTERS = {ch: -4.5 - 0.0371 * i - 0.00113 * i * i for i, ch in enumerate("etaoinshrdlcumwfgypbvkjxqz")}
SCORES = {**LONG, SPACE: -4.25, **LETTERS}
PIECES = ["<unk>", *SCORES]
IDS = {piece: i for i, piece in enumerate(PIECES)}
WORST = min(SCORES.values()) - 10.0
LONGEST = max(map(len, SCORES))


def words(text):
    if not text:
        return []
    return re.findall(f"{SPACE}[^{SPACE}]*", SPACE + text.replace(" ", SPACE))


def viterbi(word):
    best, came = [0.0] + [-math.inf] * len(word), [None] * (len(word) + 1)
    for end in range(1, len(word) + 1):
        for start in range(max(0, end - LONGEST), end):
            piece = word[start:end]
            score = SCORES.get(piece, WORST if end - start == 1 else None)
            if score is not None and best[start] + score > best[end]:
                best[end], came[end] = best[start] + score, start
    cuts, end = [], len(word)
    while end:
        cuts.append(word[came[end] : end])
        end = came[end]
    return cuts[::-1]


def encode(text):
    return [IDS.get(piece, UNK) for word in words(text) for piece in viterbi(word)]


def decode(ids):
    return "".join(PIECES[i] for i in ids).replace(SPACE, " ")[1:]


subject = Subject(
    kind="tokenizer",
    forward=lambda m, text: encode(text),
    decode=lambda m, ids: decode(ids),
    words=lambda m, text: [list(word) for word in words(text)],
    vocabulary=lambda m: dict(IDS),
    scores=lambda m: dict(SCORES),
    declares={"algorithm": "unigram", "unknown_id": UNK},
)
