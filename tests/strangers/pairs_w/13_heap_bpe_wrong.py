WHAT = "After a merge the back link is set on the symbol that has gone instead of on the next one, so that a pair of two merged symbols is not offered to the queue when the right one is merged last (line 94)."

"""Byte-level BPE with the queue of SentencePiece: O(n log n), pairs wait in a heap by the rank of their merge.

Bytes are written as characters 0 .. 255 (latin-1), so that a piece is a str.
"""

import heapq
import re
from collections import Counter

from veriformer.properties import Subject

WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s+")
TEXT = """the cat sat on the mat and the other cat at the gate hated that the rat ate the oats in the attic
there then these those other mother father gather weather whether leather together tether teeth
banana bandana ananas cabana abacab abracadabra cadabra mississippi missing sipping dissipating
in the beginning the thing thinned, and the thinking things began again; nothing, something, anything
state static statistics attention retention intention tension extension detention sentence essence presence
aaa aaaa aaaaa abab ababab babab bababa ttt tttt tatata atatat inin ininin nini"""


def as_bytes(text):
    return text.encode("utf-8").decode("latin-1")


def learn(texts, vocab_size):
    """Merges in the order of their learning: the most frequent pair, among equals the smallest."""
    words = Counter(tuple(as_bytes(w)) for text in texts for w in WORD.findall(text))
    merges = []
    while 256 + len(merges) < vocab_size:
        pairs = Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += count
        if not pairs:
            break
        pair = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(pair)
        words = Counter({tuple(apply_merge(list(w), pair)): n for w, n in words.items()})
    return merges


def apply_merge(word, pair):
    out, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


class HeapBPE:
    def __init__(self, merges):
        self.merges = merges
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        pieces = [chr(b) for b in range(256)]
        for left, right in merges:
            if left + right not in pieces:
                pieces.append(left + right)
        self.vocab = {piece: i for i, piece in enumerate(pieces)}
        self.pieces = pieces

    def segment(self, symbols):
        """One word: symbols in a doubly linked list, candidate pairs in a heap (rank, place of the left one)."""
        symbols = list(symbols)
        after = list(range(1, len(symbols) + 1))
        before = list(range(-1, len(symbols) - 1))
        heap = []

        def offer(i):
            j = after[i] if i >= 0 else len(symbols)
            if i >= 0 and j < len(symbols):
                rank = self.ranks.get((symbols[i], symbols[j]))
                if rank is not None:
                    heapq.heappush(heap, (rank, i))

        for i in range(len(symbols)):
            offer(i)
        while heap:
            rank, i = heapq.heappop(heap)
            j = after[i]
            if symbols[i] is None or j >= len(symbols):
                continue
            if self.ranks.get((symbols[i], symbols[j])) != rank:
                continue  # one of the two has changed since
            symbols[i] += symbols[j]
            symbols[j] = None
            after[i] = after[j]
            if after[i] < len(symbols):
                before[j] = i
            offer(before[i])
            offer(i)
        return [s for s in symbols if s is not None]

    def encode(self, text):
        return [self.vocab[piece] for word in WORD.findall(text) for piece in self.segment(as_bytes(word))]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids).encode("latin-1").decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="heap BPE",
    build=lambda c: HeapBPE(learn([TEXT], 256 + 240)),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    train=lambda texts, vocab_size: HeapBPE(learn(texts, vocab_size)),
    words=lambda model, text: [list(as_bytes(word)) for word in WORD.findall(text)],
    vocabulary=lambda model: dict(model.vocab),
    merges=lambda model: list(model.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
