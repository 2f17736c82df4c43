WHAT = "training counts a pair once for every distinct word instead of as often as the word occurs (`pairs[pair] += 1`): merges are not of the most frequent pair"
"""Byte-level BPE (GPT-2's alphabet), trained on word counts."""
import re
from collections import Counter

from veriformer.properties import Subject


def byte_alphabet():
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 0
    for b in range(256):
        if b in keep:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + extra)
            extra += 1
    return table


BYTES = byte_alphabet()
CHARS = {c: b for b, c in BYTES.items()}
SPLIT = re.compile(r" ?[^\s]+|\s+(?!\S)|\s+")


def symbols(text):
    return [[BYTES[b] for b in word.encode("utf-8")] for word in SPLIT.findall(text)]


def replace(word, pair):
    out, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


class BPE:
    def __init__(self, merges):
        self.merges = list(merges)
        self.rank = {pair: i for i, pair in enumerate(self.merges)}
        pieces = [BYTES[b] for b in range(256)] + [a + b for a, b in self.merges]
        self.vocab = {}
        for piece in pieces:
            self.vocab.setdefault(piece, len(self.vocab))
        self.pieces = {i: p for p, i in self.vocab.items()}

    @classmethod
    def train(cls, texts, vocab_size):
        frequency = Counter(tuple(word) for text in texts for word in symbols(text))
        words = {word: list(word) for word in frequency}
        merges, known = [], set(BYTES.values())
        while len(known) < vocab_size:
            pairs = Counter()
            for word, pieces in words.items():
                for pair in zip(pieces, pieces[1:]):
                    pairs[pair] += 1
            if not pairs:
                break
            best = min(pairs, key=lambda p: (-pairs[p], p))
            merges.append(best)
            known.add(best[0] + best[1])
            words = {word: replace(pieces, best) for word, pieces in words.items()}
        return cls(merges)

    def segment(self, word):
        word = list(word)
        while len(word) > 1:
            best = min(zip(word, word[1:]), key=lambda p: self.rank.get(p, float("inf")))
            if best not in self.rank:
                break
            word = replace(word, best)
        return word

    def encode(self, text):
        return [self.vocab[piece] for word in symbols(text) for piece in self.segment(word)]

    def decode(self, ids):
        return bytes(CHARS[c] for i in ids for c in self.pieces[i]).decode("utf-8", errors="replace")


CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "the theory of the thing is that the others gather there",
    "low lower lowest newer newest wider widest",
] * 2

subject = Subject(
    kind="tokenizer",
    name="byte bpe",
    build=lambda c: BPE.train(CORPUS, 300),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    train=BPE.train,
    words=lambda m, text: symbols(text),
    vocabulary=lambda m: m.vocab,
    merges=lambda m: m.merges,
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
