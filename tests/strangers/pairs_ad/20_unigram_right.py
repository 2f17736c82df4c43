"""A unigram tokenizer: the likeliest segmentation by Viterbi; characters without a piece fall back to bytes."""

import math
import re
from collections import Counter

from veriformer.properties import Subject

WORD = re.compile(r" ?\S+|\s+")
CORPUS = (
    "the model of the language gives the next token of the text, and the next token gives the next state; "
    "the attention of the model sees the tokens of the text, the language of the model is the text of the language"
)
BYTE_SCORE = -14.0


def seed_pieces(text, longest=6, keep=60):
    """Frequent substrings within words, scored by their share; every character is one of them."""
    counts = Counter()
    for word in WORD.findall(text):
        for i in range(len(word)):
            for j in range(i + 1, min(i + longest, len(word)) + 1):
                counts[word[i:j]] += 1
    long = sorted((p for p in counts if len(p) > 1), key=lambda p: (-counts[p] * (len(p) - 1), p))[:keep]
    chosen = {p: counts[p] for p in [*sorted(set(text)), *long]}
    total = sum(chosen.values())
    return {p: math.log(n / total) for p, n in chosen.items()}


class UnigramTokenizer:
    def __init__(self, pieces):
        self.pieces = pieces
        self.max_piece_length = max(map(len, pieces))
        self.byte_ids = {f"<0x{b:02X}>": b for b in range(256)}
        self.vocab = {**self.byte_ids, **{p: 256 + i for i, p in enumerate(pieces)}}
        self.by_id = {i: p for p, i in self.vocab.items()}

    def viterbi(self, word):
        """Best segmentation of word[:end] for every end, then back from the last."""
        n = len(word)
        best = [0.0] + [-math.inf] * n
        back = [0] * (n + 1)
        for end in range(1, n + 1):
            for start in range(max(0, end - self.max_piece_length), end):
                piece = word[start:end]
                if piece in self.pieces:
                    score = self.pieces[piece]
                elif end - start == 1:
                    score = BYTE_SCORE * len(piece.encode("utf-8"))
                else:
                    continue
                if best[start] + score > best[end]:
                    best[end], back[end] = best[start] + score, start
        cuts, end = [], n
        while end > 0:
            cuts.append(word[back[end] : end])
            end = back[end]
        return cuts[::-1]

    def encode(self, text):
        ids = []
        for word in WORD.findall(text):
            for piece in self.viterbi(word):
                if piece in self.pieces:
                    ids.append(self.vocab[piece])
                else:
                    ids.extend(piece.encode("utf-8"))
        return ids

    def decode(self, ids):
        return b"".join(bytes([i]) if i < 256 else self.by_id[i].encode("utf-8") for i in ids).decode(
            "utf-8", errors="replace"
        )

    def scores(self):
        return {**dict.fromkeys(self.byte_ids, BYTE_SCORE), **self.pieces}


subject = Subject(
    kind="tokenizer",
    name="UnigramTokenizer",
    build=lambda c: UnigramTokenizer(seed_pieces(CORPUS)),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    words=lambda m, text: [list(word) for word in WORD.findall(text)],
    vocabulary=lambda m: m.vocab,
    scores=lambda m: m.scores(),
    declares={"algorithm": "unigram", "byte_level": True, "reversible": True},
)
