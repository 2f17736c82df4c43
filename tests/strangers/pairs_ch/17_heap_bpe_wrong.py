"""Byte-level BPE in O(n log n): a linked list of pieces and a heap of candidate merges."""
import heapq
import re
from collections import Counter

import torch  # noqa: F401

from veriformer.properties import Subject

CORPUS = (
    "the theme of these three trees ====== banana bandana mississippi miss ---- the hiss "
    "aaa aaaa aah hahaha ha def self.self = selfless ==== ---- ====== yes yesss assess e.g. 0000 100000 00"
)


def split(text):
    """Words with the space before them, as lists of bytes written as characters."""
    return [list(w.encode("utf-8").decode("latin-1")) for w in re.findall(r" ?\S+|\s+?(?=\s\S)|\s+", text)]


def learn(text, count):
    words, merges = [list(w) for w in split(text)], []
    for _ in range(count):
        pairs = Counter(p for w in words for p in zip(w, w[1:]))
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        for w in words:
            i = 0
            while i < len(w) - 1:
                if (w[i], w[i + 1]) == best:
                    w[i : i + 2] = [w[i] + w[i + 1]]
                i += 1
    return merges


class HeapBPE:
    def __init__(self, merges):
        self.merges = merges
        self.rank = {pair: i for i, pair in enumerate(merges)}
        self.ids = {chr(i): i for i in range(256)}
        for a, b in merges:
            self.ids.setdefault(a + b, len(self.ids))
        self.pieces = {i: p for p, i in self.ids.items()}

    def segment(self, word):
        pieces = list(word)
        n = len(pieces)
        before, after = list(range(-1, n - 1)), list(range(1, n + 1))
        heap = []

        def offer(i):
            j = after[i] if i >= 0 else n
            if j < n and (pieces[i], pieces[j]) in self.rank:
                pair = (pieces[i], pieces[j])
                heapq.heappush(heap, (self.rank[pair], -i, i, pair))

        for i in range(n - 1):
            offer(i)
        while heap:
            _, _, i, pair = heapq.heappop(heap)
            j = after[i]
            if pieces[i] is None or j >= n or (pieces[i], pieces[j]) != pair:
                continue  # stale
            pieces[i], pieces[j] = pieces[i] + pieces[j], None
            after[i] = after[j]
            if after[i] < n:
                before[after[i]] = i
            offer(before[i])
            offer(i)
        return [p for p in pieces if p is not None]

    def encode(self, text):
        return [self.ids[p] for word in split(text) for p in self.segment(word)]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids).encode("latin-1").decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="BPE with a heap",
    build=lambda c: HeapBPE(learn(CORPUS, 60)),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    words=lambda m, text: split(text),
    vocabulary=lambda m: dict(m.ids),
    merges=lambda m: list(m.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)

WHAT = "Among candidates of one rank the heap gives the rightmost first: runs such as 'aaa' are merged from their end, a|aa instead of aa|a, other than the merges were learnt (line 57)."
