"""Byte-level BPE that encodes with a heap over a linked list, n log n, in place of a scan for every merge."""
import heapq
from collections import Counter

import torch  # noqa: F401

from veriformer.properties import Subject

CORPUS = (
    "an banana ananas abacus cab baca abc bca acb cba aabb bbaa abab baba add dad bad dab bead abed deaf fade face cafe "
    "ant tent ten net nest eat neat ate tea seat east noon onion union inn into not ton tin nit the he she these then "
    "hen when we were new newer newest low lower lowest wide wider widest sell sells shell shells"
).split()


def learn(texts, number):
    """Merges of pairs of ids, in the order in which they are learnt; no pair goes over the end of a text."""
    texts, merges = [list(text.encode()) for text in texts], []
    while len(merges) < number:
        counts = Counter(pair for ids in texts for pair in zip(ids, ids[1:]))
        pair = max(counts, key=lambda p: (counts[p], p))
        merged = 256 + len(merges)
        for ids in texts:
            i = 0
            while i + 1 < len(ids):
                if (ids[i], ids[i + 1]) == pair:
                    ids[i : i + 2] = [merged]
                i += 1
        merges.append(pair)
    return merges


class HeapBPE:
    def __init__(self, merges):
        self.pairs = merges
        self.rank = {pair: i for i, pair in enumerate(merges)}
        self.pieces = [bytes([i]) for i in range(256)]
        for left, right in merges:
            self.pieces.append(self.pieces[left] + self.pieces[right])

    def encode(self, text):
        ids = list(text.encode())
        end = len(ids)
        after = [i + 1 for i in range(end)]
        before = [i - 1 for i in range(end)]
        heap = []

        def push(i):
            if i >= 0 and after[i] < end:
                pair = (ids[i], ids[after[i]])
                if pair in self.rank:
                    heapq.heappush(heap, (self.rank[pair], i))

        for i in range(end - 1):
            push(i)
        while heap:
            rank, i = heapq.heappop(heap)
            if ids[i] < 0 or after[i] >= end:
                continue  # a neighbour was merged away meanwhile
            gone = after[i]
            ids[i], ids[gone] = 256 + rank, -1
            after[i] = after[gone]
            if after[i] < end:
                before[after[i]] = i
            push(before[i])
            push(i)
        return [token for token in ids if token >= 0]

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


def name(piece):
    return piece.decode("latin-1")


subject = Subject(
    kind="tokenizer",
    name="BPE with a heap",
    build=lambda c: HeapBPE(learn(CORPUS, 60)),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode([int(i) for i in ids]),
    vocabulary=lambda model: {name(piece): i for i, piece in enumerate(model.pieces)},
    merges=lambda model: [(name(model.pieces[a]), name(model.pieces[b])) for a, b in model.pairs],
    words=lambda model, text: [[name(bytes([b])) for b in text.encode()]] if text else [],
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)

WHAT = (
    'Line 58: '
    'Entries of the heap whose pair is no longer there are not thrown away: an old pair is merged although its neighbour has become a longer piece, whose rest is lost.'
)
