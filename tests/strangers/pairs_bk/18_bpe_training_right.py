import re
from collections import Counter

from veriformer.properties import Subject

CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "the lowest of the low, the newest of the new: the widest, the oldest, the best",
    "that is what the others gathered there, then and there",
    "old gold, bold and cold; she sold it and told them all",
]
WORD = re.compile(r"\s?[^\s]+|\s")


def pre_tokenize(text):
    return [[chr(byte) for byte in word.encode("utf-8")] for word in WORD.findall(text)]


def merge(symbols, pair):
    out, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            out.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return tuple(out)


class BytePairEncoder:
    def __init__(self, merges):
        self.merges = merges
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        pieces = [chr(byte) for byte in range(256)] + [a + b for a, b in merges]
        self.vocab = {}
        for piece in pieces:
            self.vocab.setdefault(piece, len(self.vocab))
        self.pieces = {number: piece for piece, number in self.vocab.items()}

    @classmethod
    def train(cls, texts, vocab_size):
        words = Counter(tuple(word) for text in texts for word in pre_tokenize(text))
        merges = []
        while 256 + len(merges) < vocab_size:
            counts = Counter()
            for word, occurrences in words.items():
                for pair in zip(word, word[1:]):
                    counts[pair] += occurrences
            if not counts:
                break
            best = max(counts, key=counts.get)
            merges.append(best)
            merged = Counter()
            for word, occurrences in words.items():
                merged[merge(word, best)] += occurrences
            words = merged
        return cls(merges)

    def encode(self, text):
        ids = []
        for word in pre_tokenize(text):
            word = tuple(word)
            while len(word) > 1:
                best = min(zip(word, word[1:]), key=lambda pair: self.ranks.get(pair, float("inf")))
                if best not in self.ranks:
                    break
                word = merge(word, best)
            ids.extend(self.vocab[piece] for piece in word)
        return ids

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids).encode("latin-1").decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    build=lambda c: BytePairEncoder.train(CORPUS, 300),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    train=BytePairEncoder.train,
    words=lambda model, text: pre_tokenize(text),
    vocabulary=lambda model: dict(model.vocab),
    merges=lambda model: list(model.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
