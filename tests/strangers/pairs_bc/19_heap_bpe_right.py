"""Byte-level BPE with a heap of pairs over a linked list of symbols, as fast tokenizers have it."""
import heapq
import re
from collections import Counter

from veriformer.properties import Subject

CORPUS = """the transformer attends to the tokens that came before the token, and the weights that it gives to them
are what the softmax of the scores makes of them; there are heads, and the heads of the other layers, and then others.
another lower, slower, lowest newest widest; the internationalisation of nations, rationally, national notation station"""

SPLIT = re.compile(r" ?\S+|\s+(?!\S)|\s+")


def byte_symbols():
    """A printable character for every byte (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in kept}
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + len(table) - len(kept))
    return table


TO_SYMBOL = byte_symbols()
TO_BYTE = {s: b for b, s in TO_SYMBOL.items()}


def learn(text, count):
    words = Counter(tuple(TO_SYMBOL[b] for b in w.encode()) for w in SPLIT.findall(text))
    merges = []
    while len(merges) < count:
        pairs = Counter()
        for word, n in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += n
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        merged = Counter()
        for word, n in words.items():
            out, i = [], 0
            while i < len(word):
                if word[i : i + 2] == best:
                    out.append(word[i] + word[i + 1])
                    i += 2
                else:
                    out.append(word[i])
                    i += 1
            merged[tuple(out)] += n
        words = merged
    return merges


class HeapBPE:
    def __init__(self, merges):
        self.merges = merges
        self.ranks = {pair: n for n, pair in enumerate(merges)}
        pieces = [TO_SYMBOL[b] for b in range(256)] + [a + b for a, b in merges]
        self.vocab = {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}
        self.pieces = list(self.vocab)

    def segment(self, symbols):
        symbols, end = list(symbols), len(symbols)
        before, after = list(range(-1, end - 1)), list(range(1, end + 1))
        heap = []

        def push(i, j):
            if i >= 0 and j < end:
                rank = self.ranks.get((symbols[i], symbols[j]))
                if rank is not None:
                    heapq.heappush(heap, (rank, i, symbols[i], symbols[j]))

        for i in range(end - 1):
            push(i, i + 1)
        while heap:
            _, i, left, right = heapq.heappop(heap)
            j = after[i]
            if j == end or symbols[i] != left or symbols[j] != right:
                continue  # one of the two has been merged since
            symbols[i], symbols[j] = left + right, None
            after[i] = after[j]
            if after[i] < end:
                before[after[i]] = i
            push(before[i], i)
            push(i, after[i])
        return [s for s in symbols if s is not None]

    def words(self, text):
        return [[TO_SYMBOL[b] for b in word.encode()] for word in SPLIT.findall(text)]

    def encode(self, text):
        return [self.vocab[piece] for word in self.words(text) for piece in self.segment(word)]

    def decode(self, ids):
        return bytes(TO_BYTE[s] for i in ids for s in self.pieces[i]).decode(errors="replace")


MERGES = learn(CORPUS, 80)

subject = Subject(
    kind="tokenizer",
    name="BPE with a heap",
    build=lambda c: HeapBPE(MERGES),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    words=lambda m, text: m.words(text),
    vocabulary=lambda m: m.vocab,
    merges=lambda m: m.merges,
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
