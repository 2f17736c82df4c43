WHAT = 'the bytes of each piece are decoded to text for themselves and then joined (line 82), so that a character whose UTF-8 bytes are spread over several pieces comes back as replacement characters'
import re
from collections import Counter

from veriformer.properties import Subject


def bytes_to_unicode():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {b: chr(b) for b in plain}, 0
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + extra)
            extra += 1
    return table


BYTES = bytes_to_unicode()
BACK = {letter: b for b, letter in BYTES.items()}


def pretokenize(text):
    return ["".join(BYTES[b] for b in word.encode("utf-8")) for word in re.findall(r" ?\S+|\s+", text)]


def merge(symbols, pair):
    out, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            out.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out


class ByteLevelBPE:
    def __init__(self, merges):
        self.merges = list(merges)
        self.ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        pieces = [BYTES[b] for b in range(256)] + [a + b for a, b in self.merges]
        self.vocab = {}
        for piece in pieces:
            self.vocab.setdefault(piece, len(self.vocab))
        self.pieces = {i: piece for piece, i in self.vocab.items()}

    @classmethod
    def train(cls, texts, vocab_size):
        words = Counter(word for text in texts for word in pretokenize(text))
        split = {word: list(word) for word in words}
        merges = []
        while 256 + len(merges) < vocab_size:
            counts = Counter()
            for word, frequency in words.items():
                for pair in zip(split[word], split[word][1:]):
                    counts[pair] += frequency
            if not counts:
                break
            best = min(counts, key=lambda pair: (-counts[pair], pair))
            merges.append(best)
            split = {word: merge(symbols, best) for word, symbols in split.items()}
        return cls(merges)

    def segment(self, word):
        symbols = list(word)
        while len(symbols) > 1:
            pair = min(zip(symbols, symbols[1:]), key=lambda p: self.ranks.get(p, len(self.ranks)))
            if pair not in self.ranks:
                break
            symbols = merge(symbols, pair)
        return symbols

    def words(self, text):
        return [self.segment(word) for word in pretokenize(text)]

    def encode(self, text):
        return [self.vocab[symbol] for word in self.words(text) for symbol in word]

    def decode(self, ids):
        pieces = [bytes(BACK[letter] for letter in self.pieces[int(i)]) for i in ids]
        return "".join(piece.decode("utf-8", errors="replace") for piece in pieces)


CORPUS = ["the quick brown fox jumps over the lazy dog", "the lower the newer the wider the lowest", "in the inn, in 1999"]

subject = Subject(
    kind="tokenizer",
    name="byte-level bpe",
    build=lambda c: ByteLevelBPE.train(CORPUS, 290),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    train=lambda texts, vocab_size: ByteLevelBPE.train(texts, vocab_size),
    vocabulary=lambda m: dict(m.vocab),
    merges=lambda m: list(m.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
