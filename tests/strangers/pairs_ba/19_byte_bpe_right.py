# Byte-level BPE, trained from scratch; bytes are written as the letters of GPT-2.
import re
from collections import Counter

from veriformer.properties import Subject

WORD = re.compile(r" ?[^\s]+|\s+")


def byte_letters():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in plain}
    for b in range(256):
        letters.setdefault(b, chr(256 + len(letters) - len(plain)))
    return letters


LETTER = byte_letters()
BYTE = {letter: b for b, letter in LETTER.items()}


def split(text):
    return [[LETTER[b] for b in word.encode("utf-8")] for word in WORD.findall(text)]


def join(symbols, pair):
    out, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            out.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out


class ByteBPE:
    def __init__(self, merges):
        self.merges = list(merges)
        self.rank = {pair: i for i, pair in enumerate(self.merges)}
        pieces = [LETTER[b] for b in range(256)] + [a + b for a, b in self.merges]
        self.vocab = {}
        for piece in pieces:
            self.vocab.setdefault(piece, len(self.vocab))
        self.pieces = {i: piece for piece, i in self.vocab.items()}

    @classmethod
    def train(cls, texts, vocab_size):
        freqs = Counter(tuple(word) for text in texts for word in split(text))
        words = {word: list(word) for word in freqs}
        merges = []
        while 256 + len(merges) < vocab_size:
            pairs = Counter()
            for word, freq in freqs.items():
                symbols = words[word]
                for pair in zip(symbols, symbols[1:]):
                    pairs[pair] += freq
            if not pairs:
                break
            best = max(pairs, key=lambda pair: (pairs[pair], pair))
            merges.append(best)
            words = {word: join(symbols, best) for word, symbols in words.items()}
        return cls(merges)

    def segment(self, symbols):
        while len(symbols) > 1:
            best = min(zip(symbols, symbols[1:]), key=lambda pair: self.rank.get(pair, len(self.rank)))
            if best not in self.rank:
                break
            symbols = join(symbols, best)
        return symbols

    def encode(self, text):
        return [self.vocab[piece] for word in split(text) for piece in self.segment(word)]

    def decode(self, ids):
        return bytes(BYTE[letter] for i in ids for letter in self.pieces[int(i)]).decode("utf-8", errors="replace")


CORPUS = ["the cat sat on the mat and the rat sat on the hat", "an ant and a bee and an ape", "low lower lowest slow slower"]

subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: ByteBPE.train(CORPUS, 290),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    train=lambda texts, vocab_size: ByteBPE.train(texts, vocab_size),
    words=lambda m, text: split(text),
    vocabulary=lambda m: dict(m.vocab),
    merges=lambda m: list(m.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
