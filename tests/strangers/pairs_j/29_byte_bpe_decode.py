"""A small byte-level BPE."""

import re
from collections import Counter

from veriformer.properties import Subject

WHAT = "each token is decoded as UTF-8 by itself, so that a character whose bytes lie in several tokens is lost"
CAUSE = (
    "Decoding turns each token's bytes into text by itself instead of joining the bytes first, so that characters of "
    "several bytes that are split over tokens become replacement characters."
)
TEXT = "the cat sat on the mat, and the other cat that sat there thought that the mat was theirs. " * 3
WORD = re.compile(r" ?[^\W\d_]+| ?\d+| ?[^\s\w]+|\s+|_+", re.UNICODE)


class ByteBPE:
    def __init__(self, texts=(TEXT,), vocab_size=300):
        self.pieces = [bytes([i]) for i in range(256)]
        self.ranks = {}
        words = Counter(w for text in texts for w in self.words(text))
        split = {w: list(w.encode("utf-8")) for w in words}
        while len(self.pieces) < vocab_size:
            pairs = Counter()
            for w, ids in split.items():
                for pair in zip(ids, ids[1:]):
                    pairs[pair] += words[w]
            if not pairs:
                break
            best = max(pairs, key=lambda p: (pairs[p], p))
            new = len(self.pieces)
            self.ranks[best] = new
            self.pieces.append(self.pieces[best[0]] + self.pieces[best[1]])
            split = {w: self.merge(ids, best, new) for w, ids in split.items()}

    @staticmethod
    def words(text):
        found, end = [], 0
        for match in WORD.finditer(text):
            if match.start() > end:
                found.append(text[end : match.start()])
            found.append(match.group())
            end = match.end()
        if end < len(text):
            found.append(text[end:])
        return found

    @staticmethod
    def merge(ids, pair, new):
        out, i = [], 0
        while i < len(ids):
            if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
                out.append(new)
                i += 2
            else:
                out.append(ids[i])
                i += 1
        return out

    def encode(self, text):
        out = []
        for word in self.words(text):
            ids = list(word.encode("utf-8"))
            while len(ids) > 1:
                best = min(zip(ids, ids[1:]), key=lambda p: self.ranks.get(p, 10**9))
                if best not in self.ranks:
                    break
                ids = self.merge(ids, best, self.ranks[best])
            out.extend(ids)
        return out

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


class StreamingByteBPE(ByteBPE):
    def decode(self, ids):
        return "".join(self.pieces[i].decode("utf-8", errors="replace") for i in ids)


def subject(tokenizer):
    return Subject(
        kind="tokenizer",
        name="bytes and merges",
        build=lambda c: tokenizer(),
        forward=lambda m, text: m.encode(text),
        decode=lambda m, ids: m.decode(ids),
        declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
    )


right = subject(ByteBPE)
wrong = subject(StreamingByteBPE)
