"""Byte-level BPE. A byte is written as the character of the same number (latin-1), so that pieces are strings."""
import re
from collections import Counter

from veriformer.properties import Subject

SPLIT = re.compile(r"\s?\S+|\s+")


def symbols(word):
    return list(word.encode("utf-8").decode("latin-1"))


def merge(parts, pair):
    out, i = [], 0
    while i < len(parts):
        if i + 1 < len(parts) and (parts[i], parts[i + 1]) == pair:
            out.append(parts[i] + parts[i + 1])
            i += 2
        else:
            out.append(parts[i])
            i += 1
    return out


class BPE:
    def __init__(self, merges):
        self.merges = merges
        self.rank = {pair: i for i, pair in enumerate(merges)}
        pieces = [chr(i) for i in range(256)] + [a + b for a, b in merges]
        self.vocab = {piece: i for i, piece in enumerate(pieces)}
        self.pieces = pieces

    @classmethod
    def train(cls, texts, vocab_size):
        frequency = Counter(word for text in texts for word in SPLIT.findall(text))
        words = {word: symbols(word) for word in frequency}
        merges = []
        while 256 + len(merges) < vocab_size:
            counts = Counter()
            for word, parts in words.items():
                for pair in zip(parts, parts[1:]):
                    counts[pair] += frequency[word]
            if not counts:
                break
            best = min(counts, key=lambda pair: (-counts[pair], pair))
            merges.append(best)
            words = {word: merge(parts, best) for word, parts in words.items()}
        return cls(merges)

    def encode(self, text):
        ids = []
        for word in SPLIT.findall(text):
            parts = symbols(word)
            while len(parts) > 1:
                best = min(zip(parts, parts[1:]), key=lambda pair: self.rank.get(pair, len(self.rank)))
                if best not in self.rank:
                    break
                parts = merge(parts, best)
            ids += [self.vocab[part] for part in parts]
        return ids

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids).encode("latin-1").decode("utf-8", errors="replace")


CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "the lower the newer the wider the better, low lower lowest",
    "a hat, a bat, a rat: that is what the cat sat at",
]

subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: BPE.train(CORPUS, 290),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    train=lambda texts, vocab_size: BPE.train(texts, vocab_size),
    words=lambda m, text: [symbols(word) for word in SPLIT.findall(text)],
    vocabulary=lambda m: dict(m.vocab),
    merges=lambda m: list(m.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
