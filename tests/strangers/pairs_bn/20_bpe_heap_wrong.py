WHAT = "of equal pairs the heap gives the rightmost first (the position is negated together with the rank's order, as for a maximum heap): in runs of odd length such as 'aaa' the merge is applied from the right, a + aa instead of aa + a (line 86)"
"""Byte-level BPE encoder with a heap, ported from a C++ priority queue."""

import heapq
import re

from veriformer.properties import Subject

TEXT = (
    "the cat sat on the mat and the hat... hmmm, what was that??? soooo good!!! "
    "see the moon  and  the   spoon, then the noon... aaah, aaah, zzz zzz zzz      zzzz "
    "0000 1000 10000 1000000 aaaa bbbb aaaa bbbb abababab the theme thematic\n\n\n"
)
PATTERN = re.compile(r"\s+(?=\S)|\s+$| ?[^\s]+")


def byte_letters():
    """GPT-2's letters: one printable character for every byte."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = {}, 0
    for byte in range(256):
        if byte in keep:
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(256 + extra)
            extra += 1
    return letters


LETTERS = byte_letters()
BYTES = {letter: byte for byte, letter in LETTERS.items()}


def split_words(text):
    return [[LETTERS[byte] for byte in word.encode("utf-8")] for word in PATTERN.findall(text)]


def learn(text, count):
    words, merges = split_words(text), []
    while len(merges) < count:
        pairs = {}
        for word in words:
            for pair in zip(word, word[1:]):
                pairs[pair] = pairs.get(pair, 0) + 1
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for n, word in enumerate(words):
            merged, i = [], 0
            while i < len(word):
                if tuple(word[i : i + 2]) == best:
                    merged.append(word[i] + word[i + 1])
                    i += 2
                else:
                    merged.append(word[i])
                    i += 1
            words[n] = merged
    return merges


class HeapBPE:
    def __init__(self):
        self.merges = learn(TEXT, 60)
        self.ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        pieces = [LETTERS[byte] for byte in range(256)]
        for left, right in self.merges:
            if left + right not in pieces:
                pieces.append(left + right)
        self.ids = {piece: number for number, piece in enumerate(pieces)}
        self.pieces = pieces

    def _segment(self, symbols):
        symbols = list(symbols)
        size = len(symbols)
        before = [i - 1 for i in range(size)]
        after = [i + 1 for i in range(size)]
        agenda = []

        def offer(i):
            j = after[i] if i >= 0 else size
            if i < 0 or j >= size:
                return
            rank = self.ranks.get((symbols[i], symbols[j]))
            if rank is not None:
                heapq.heappush(agenda, (rank, -i, symbols[i], symbols[j]))

        for i in range(size):
            offer(i)
        while agenda:
            _, i, left, right = heapq.heappop(agenda)
            i = -i
            j = after[i]
            if symbols[i] != left or j >= size or symbols[j] != right:
                continue  # one of the two has been merged meanwhile
            symbols[i], symbols[j] = left + right, None
            after[i] = after[j]
            if after[j] < size:
                before[after[j]] = i
            offer(before[i])
            offer(i)
        return [symbol for symbol in symbols if symbol is not None]

    def encode(self, text):
        return [self.ids[piece] for word in split_words(text) for piece in self._segment(word)]

    def decode(self, ids):
        return bytes(BYTES[letter] for i in ids for letter in self.pieces[i]).decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="heap BPE",
    build=lambda c: HeapBPE(),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    words=lambda model, text: split_words(text),
    vocabulary=lambda model: model.ids,
    merges=lambda model: model.merges,
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
