"""byte_pair_merge of tiktoken in plain Python, on bytes; pieces are shown as latin-1 strings."""
import re

import torch  # noqa: F401

from veriformer.properties import Subject

MERGES = [
    ("a", "a"), ("e", "e"), ("s", "s"), ("t", "h"), ("l", "l"), (" ", "a"), ("i", "n"), ("o", "o"), ("a", "n"), ("b", "a"),
    ("th", "e"), (" ", "the"), ("aa", "a"), ("in", "g"), (" ", " "), ("1", "1"), ("n", "n"), ("o", "n"), ("ll", "o"), ("0", "0"),
    ("h", "e"), ("he", "llo"), ("an", "a"), ("00", "0"), (".", "."), ("-", "-"), ("!", "!"), ("x", "x"), ("b", "b"), ("c", "c"),
]
SPLIT = re.compile(r" ?[^\s]+|\s+")


class BytePairs:
    def __init__(self):
        self.vocab = {chr(i): i for i in range(256)}
        for left, right in MERGES:
            self.vocab[left + right] = len(self.vocab)
        self.pieces = {i: piece for piece, i in self.vocab.items()}
        self.rank = {pair: i for i, pair in enumerate(MERGES)}

    def byte_pair_merge(self, word):
        parts = list(word)
        while True:
            least, at = None, None
            for i in range(len(parts) - 1):
                rank = self.rank.get((parts[i], parts[i + 1]))
                if rank is not None and (least is None or rank < least):
                    least, at = rank, i
            if at is None:
                return parts
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    def words(self, text):
        return [list(word.encode("utf-8").decode("latin-1")) for word in SPLIT.findall(text)]

    def encode(self, text):
        return [self.vocab[piece] for word in self.words(text) for piece in self.byte_pair_merge(word)]

    def decode(self, ids):
        return "".join(self.pieces[int(i)] for i in ids).encode("latin-1").decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte pairs",
    build=lambda c: BytePairs(),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    words=lambda m, text: m.words(text),
    vocabulary=lambda m: dict(m.vocab),
    merges=lambda m: list(MERGES),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
