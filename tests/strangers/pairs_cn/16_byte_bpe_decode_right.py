"""Byte-level BPE in plain Python, after minbpe: learn, encode, decode."""
import torch  # noqa: F401
from veriformer.properties import Subject

CORPUS = "the transformer attends to the tokens of the text, the text attends to nothing. naïve café, naïve été " * 3


def most_common_pair(ids):
    counts = {}
    for pair in zip(ids, ids[1:]):
        counts[pair] = counts.get(pair, 0) + 1
    return max(counts, key=counts.get) if counts else None


def merge(ids, pair, new):
    out, i = [], 0
    while i < len(ids):
        if tuple(ids[i : i + 2]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


class ByteBPE:
    def __init__(self, corpus=CORPUS, merges=24):
        self.ranks = {}
        self.pieces = [bytes([b]) for b in range(256)]
        ids = list(corpus.encode("utf-8"))
        for _ in range(merges):
            pair = most_common_pair(ids)
            if pair is None:
                break
            self.ranks[pair] = len(self.pieces)
            ids = merge(ids, pair, len(self.pieces))
            self.pieces.append(self.pieces[pair[0]] + self.pieces[pair[1]])

    def encode(self, text):
        ids = list(text.encode("utf-8"))
        while len(ids) > 1:
            pair = min(zip(ids, ids[1:]), key=lambda p: self.ranks.get(p, float("inf")))
            if pair not in self.ranks:
                break
            ids = merge(ids, pair, self.ranks[pair])
        return ids

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte BPE",
    build=lambda c: ByteBPE(),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
