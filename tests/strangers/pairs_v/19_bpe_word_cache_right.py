"""Byte-level BPE that remembers the pieces of words it has seen."""

import re
from collections import Counter

import torch

from veriformer.properties import DrawnConfig, Subject

TEXT = "the cat sat on the mat, the other cat and that hat were on the bat; then the rat ate the oats there at ten"
WORDS = re.compile(r" ?\w+| ?[^\w\s]+|\s+")


def letters():
    """A printable letter for every byte, as GPT-2 has it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        shown.setdefault(byte, chr(256 + len(shown) - len(plain)))
    return shown


SHOWN = letters()
BYTES = {letter: byte for byte, letter in SHOWN.items()}


def split(text):
    return [[SHOWN[byte] for byte in word.encode("utf-8")] for word in WORDS.findall(text)]


def join(symbols, pair):
    """Every occurrence of the pair, from the left, becomes one symbol."""
    out, index = [], 0
    while index < len(symbols):
        both = tuple(symbols[index : index + 2]) == pair
        out.append(symbols[index] + symbols[index + 1] if both else symbols[index])
        index += 2 if both else 1
    return out


class Tokenizer:
    def __init__(self, merges=24):
        words, self.merges = split(TEXT), []
        for _ in range(merges):
            counts = Counter(pair for word in words for pair in zip(word, word[1:], strict=False))
            pair = max(sorted(counts), key=counts.get)
            self.merges.append(pair)
            words = [join(word, pair) for word in words]
        self.ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        pieces = dict.fromkeys([*(SHOWN[byte] for byte in range(256)), *(a + b for a, b in self.merges)])
        self.ids = {piece: index for index, piece in enumerate(pieces)}
        self.pieces = list(pieces)
        self.seen = {}

    def word(self, symbols):
        key = "".join(symbols)
        if key not in self.seen:
            while len(symbols) > 1:
                pair = min(zip(symbols, symbols[1:], strict=False), key=lambda p: self.ranks.get(p, len(self.ranks)))
                if pair not in self.ranks:
                    break
                symbols = join(symbols, pair)
            self.seen[key] = [self.ids[symbol] for symbol in symbols]
        return self.seen[key]

    def encode(self, text):
        words = split(text)
        if not words:
            return []
        ids = list(self.word(words[0]))
        for symbols in words[1:]:
            ids += self.word(symbols)
        return ids

    def decode(self, ids):
        return bytes(BYTES[letter] for index in ids for letter in self.pieces[index]).decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="BPE with remembered words",
    build=lambda c: Tokenizer(),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    words=lambda model, text: split(text),
    vocabulary=lambda model: model.ids,
    merges=lambda model: model.merges,
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
if __name__ == "__main__":
    print(torch.tensor(subject.build(DrawnConfig()).encode("the cat")).shape)
