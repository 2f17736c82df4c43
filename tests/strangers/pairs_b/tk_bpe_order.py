"""Byte-level BPE in GPT-2's manner with merges learnt from a small text."""
import re
from collections import Counter

from veriformer.properties import Subject

TEXT = """It is a truth that a model is no better than its tests, and that a test is no better than the question it asks.
Reading an implementation line by line seldom shows the mistake: the line that is wrong looks like the line that is right,
and the error it makes is small enough to be taken for noise. Training hides it even better, since gradients repair what
they can. So one states what must hold, in general and in advance, measures it on small inputs, and trusts the measurement
more than the reader. Sentences, letters, tables and other interesting structures are stored, sorted and restored; entire
streets of stones and trees are listed there, with the nearest station at the end of the terrace."""


def byte_letters():
    """Every byte as a printable letter, as GPT-2 has it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {b: chr(b) for b in plain}, 0
    for b in range(256):
        if b not in table:
            table[b], extra = chr(256 + extra), extra + 1
    return table


LETTERS = byte_letters()
BYTES = {letter: b for b, letter in LETTERS.items()}


def split(text):
    return [[LETTERS[b] for b in word.encode()] for word in re.findall(r" ?\w+| ?[^\w\s]+|\s+", text)]


def join(word, pair):
    out, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def learn(text, n):
    words, merges = split(text), []
    for _ in range(n):
        counts = Counter(pair for word in words for pair in zip(word, word[1:]))
        if not counts:
            break
        pair = min(counts, key=lambda p: (-counts[p], p))
        merges.append(pair)
        words = [join(word, pair) for word in words]
    return merges


class Tokenizer:
    def __init__(self, merges, bad):
        self.merges, self.bad = merges, bad
        self.rank = {pair: i for i, pair in enumerate(merges)}
        pieces = [LETTERS[b] for b in range(256)] + [a + b for a, b in merges]
        self.vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
        self.pieces = {i: piece for piece, i in self.vocabulary.items()}

    def segment(self, word):
        while True:
            known = [pair for pair in zip(word, word[1:]) if pair in self.rank]
            if not known:
                return word
            word = join(word, known[0] if self.bad else min(known, key=self.rank.get))

    def encode(self, text):
        return [self.vocabulary[piece] for word in split(text) for piece in self.segment(word)]

    def decode(self, ids):
        return bytes(BYTES[letter] for i in ids for letter in self.pieces[i]).decode("utf-8", "replace")


MERGES = learn(TEXT, 150)


def subject(bad):
    return Subject(
        kind="tokenizer", build=lambda c: Tokenizer(MERGES, bad), forward=lambda m, text: m.encode(text),
        decode=lambda m, ids: m.decode(ids), words=lambda m, text: split(text), vocabulary=lambda m: m.vocabulary,
        merges=lambda m: m.merges, declares={"algorithm": "bpe", "byte_level": True, "reversible": True})


right, wrong = subject(False), subject(True)
WHAT = "Merges are applied from left to right (the first pair of the word that has a merge) instead of in the order in which they were learnt."
PLACE = "BPE segmentation (order of merges)"
