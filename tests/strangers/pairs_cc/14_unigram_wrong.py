WHAT = 'the Viterbi lattice is cut one short of the longest piece (line 25), so that the longest pieces of the vocabulary are never found and the segmentation is not the most probable one'
import math

from veriformer.properties import Subject

UNK = 0


class UnigramLM:
    """Viterbi segmentation by piece log probabilities; spaces are written as U+2581."""

    def __init__(self, counts):
        total = sum(counts.values())
        self.log_prob = {piece: math.log(n / total) for piece, n in counts.items()}
        self.ids = {piece: i + 1 for i, piece in enumerate(counts)}
        self.pieces = {i: piece for piece, i in self.ids.items()}
        self.longest = max(map(len, counts))
        self.unknown = min(self.log_prob.values()) - 10.0

    def segment(self, text):
        n = len(text)
        best = [0.0] + [-math.inf] * n
        back = [0] * (n + 1)
        for end in range(1, n + 1):
            for start in range(max(0, end - self.longest + 1), end):
                piece = text[start:end]
                if piece in self.log_prob:
                    score = best[start] + self.log_prob[piece]
                elif len(piece) == 1:
                    score = best[start] + self.unknown
                else:
                    continue
                if score > best[end]:
                    best[end], back[end] = score, start
        out, end = [], n
        while end > 0:
            out.append(text[back[end] : end])
            end = back[end]
        return out[::-1]

    def encode(self, text):
        return [self.ids.get(piece, UNK) for piece in self.segment(text.replace(" ", "\u2581"))]

    def decode(self, ids):
        return "".join(self.pieces.get(int(i), "\u2047") for i in ids).replace("\u2581", " ")


COUNTS = {letter: 40 + 7 * (ord(letter) % 5) for letter in "abcdefghijklmnopqrstuvwxyz\u2581.,"}
COUNTS |= {"th": 61, "he": 66, "in": 58, "er": 53, "an": 47, "re": 43, "on": 41, "ab": 31, "ba": 29, "\u2581t": 63, "\u2581a": 49}
COUNTS |= {"the": 90, "ing": 77, "and": 68, "ion": 37, "aba": 23, "hel": 19, "llo": 21, "wor": 17, "\u2581th": 50, "abc": 27, "ent": 33}

subject = Subject(
    kind="tokenizer",
    name="unigram",
    build=lambda c: UnigramLM(COUNTS),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    vocabulary=lambda m: dict(m.ids),
    scores=lambda m: dict(m.log_prob),
    declares={"algorithm": "unigram", "byte_level": False, "reversible": False, "unknown_id": UNK},
)
