"""Byte-level BPE: 256 bytes and what was merged from a small corpus."""
import re
from collections import Counter

from veriformer.properties import Subject

CORPUS = (
    "the cat sat on the mat and the other cat sat on the hat; the waiter of the café on the other side "
    "brought the cat a naïve résumé of the café, the café that the mice, für Elise, had left behind\n"
) * 3
SPLIT = re.compile(r" ?[^\s]+|\s")


class ByteBPE:
    def __init__(self, merges):
        self.pieces = [bytes([b]) for b in range(256)]
        self.ranks = {}
        for rank, (left, right) in enumerate(merges):
            self.ranks[left, right] = rank
            self.pieces.append(self.pieces[left] + self.pieces[right])

    @staticmethod
    def join(ids, pair, new):
        out, i = [], 0
        while i < len(ids):
            if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
                out.append(new)
                i += 2
            else:
                out.append(ids[i])
                i += 1
        return out

    @classmethod
    def train(cls, texts, vocab_size):
        words = Counter(word for text in texts for word in SPLIT.findall(text))
        words = [[list(word.encode("utf-8")), n] for word, n in words.items()]
        merges = []
        while 256 + len(merges) < vocab_size:
            counts = Counter()
            for ids, n in words:
                for pair in zip(ids, ids[1:]):
                    counts[pair] += n
            if not counts:
                break
            pair = max(counts, key=lambda p: (counts[p], p))
            for entry in words:
                entry[0] = cls.join(entry[0], pair, 256 + len(merges))
            merges.append(pair)
        return cls(merges)

    def encode(self, text):
        out = []
        for word in SPLIT.findall(text):
            ids = list(word.encode("utf-8"))
            while len(ids) > 1:
                pair = min(zip(ids, ids[1:]), key=lambda p: self.ranks.get(p, len(self.ranks)))
                if pair not in self.ranks:
                    break
                ids = self.join(ids, pair, 256 + self.ranks[pair])
            out.extend(ids)
        return out

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: ByteBPE.train([CORPUS], 400),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
