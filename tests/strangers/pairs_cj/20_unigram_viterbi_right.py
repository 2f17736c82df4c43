"""A unigram tokenizer over UTF-8 bytes, segmented by Viterbi; every byte is a piece, so nothing is unknown."""
import math
from collections import Counter

from veriformer.properties import Subject

CORPUS = """the attention of the reader is drawn to the relation between the tokens and the positions of the tokens
in the sentence: attention is all that the transformer needs, and the position of a token is given to the transformer"""
LONGEST = 9


def symbols(text):
    """Each byte as one character."""
    return text.encode("utf-8", errors="surrogatepass").decode("latin-1")


class Unigram:
    def __init__(self):
        counts = Counter(
            CORPUS[i : i + n] for n in range(2, LONGEST + 1) for i in range(len(CORPUS) - n + 1) if "\n" not in CORPUS[i : i + n]
        )
        frequent = sorted((p for p in counts if counts[p] >= 2), key=lambda p: (-counts[p], p))
        total = sum(counts[p] for p in frequent) + 256
        self.score = {chr(b): math.log(1 / total) - 0.001 * b for b in range(256)}
        self.score |= {p: math.log(counts[p] / total) - 0.0001 * i for i, p in enumerate(frequent)}
        self.ids = {p: i for i, p in enumerate(self.score)}
        self.pieces = list(self.score)
        self.longest = max(map(len, self.pieces))

    def encode(self, text):
        s = symbols(text)
        best, came = [0.0] + [-math.inf] * len(s), [0] * (len(s) + 1)
        for end in range(1, len(s) + 1):
            for start in range(max(0, end - self.longest), end):
                score = self.score.get(s[start:end])
                if score is not None and best[start] + score > best[end]:
                    best[end], came[end] = best[start] + score, start
        ids, end = [], len(s)
        while end > 0:
            ids.append(self.ids[s[came[end] : end]])
            end = came[end]
        return ids[::-1]

    def decode(self, ids):
        data = "".join(self.pieces[i] for i in ids).encode("latin-1")
        try:
            return data.decode("utf-8", errors="surrogatepass")
        except UnicodeDecodeError:
            return data.decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    build=lambda c: Unigram(),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    vocabulary=lambda m: dict(m.ids),
    scores=lambda m: dict(m.score),
    words=lambda m, text: [list(symbols(text))] if text else [],
    declares={"algorithm": "unigram", "byte_level": True, "reversible": True},
)
