import re
from collections import Counter

from veriformer.properties import Subject

WORD = re.compile(r" ?\w+| ?[^\s\w]+|\s+")

CORPUS = [
    "the lower the newer the wider, the lowest and the newest",
    "low low low lower lower newest newest newest newest newest newest widest widest widest",
    "attention is all you need; you need the attention that you pay",
    "a transformer transforms the tokens that a tokenizer tokenizes",
    "naïve café, 12 + 30 = 42",
]


def to_symbols(word):
    """One character a byte."""
    return list(word.encode("utf-8", errors="surrogatepass").decode("latin-1"))


def merge(symbols, pair):
    merged, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            merged.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            merged.append(symbols[i])
            i += 1
    return merged


class BPE:
    def __init__(self):
        self.vocab = {chr(i): i for i in range(256)}
        self.merges = []

    @classmethod
    def train(cls, texts, vocab_size):
        self = cls()
        freqs = Counter(word for text in texts for word in WORD.findall(text))
        splits = {word: to_symbols(word) for word in freqs}
        while len(self.vocab) < vocab_size:
            pairs = Counter()
            for word, symbols in splits.items():
                for pair in zip(symbols, symbols[1:]):
                    pairs[pair] += freqs[word]
            if not pairs:
                break
            best = max(pairs, key=lambda pair: (pairs[pair], pair))
            self.merges.append(best)
            self.vocab.setdefault(best[0] + best[1], len(self.vocab))
            splits = {word: merge(symbols, best) for word, symbols in splits.items()}
        return self

    def words(self, text):
        return [to_symbols(word) for word in WORD.findall(text)]

    def encode(self, text):
        rank = {pair: i for i, pair in enumerate(self.merges)}
        ids = []
        for symbols in self.words(text):
            while len(symbols) > 1:
                pair = min(zip(symbols, symbols[1:]), key=lambda p: rank.get(p, len(rank)))
                if pair not in rank:
                    break
                symbols = merge(symbols, pair)
            ids.extend(self.vocab[s] for s in symbols)
        return ids

    def decode(self, ids):
        piece = {i: p for p, i in self.vocab.items()}
        return "".join(piece[int(i)] for i in ids).encode("latin-1").decode("utf-8", errors="surrogatepass")


subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: BPE.train(CORPUS, 256 + 60),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    train=BPE.train,
    words=lambda model, text: model.words(text),
    vocabulary=lambda model: dict(model.vocab),
    merges=lambda model: list(model.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
