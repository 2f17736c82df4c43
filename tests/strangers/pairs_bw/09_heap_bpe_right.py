import heapq
import re
from veriformer.properties import Subject

MERGES = ["h e", "t h", "t he", "i n", "n g", "in g", "e r", "r e", "a n", "n d", "an d", "o n", "o r", "e s", "s t", "e n",
          "a t", "l l", "o u", "e d", "a a", "a b", "b a", "l o", "o w", "w o", "c d", "b c", "x y", "  t", "  a", "  w"]


class Tokenizer:
    """Byte-level BPE; merging by a heap of candidates over a linked list, O(n log n)."""

    def __init__(self):
        self.pieces = [bytes([b]) for b in range(256)]
        self.ids = {p: i for i, p in enumerate(self.pieces)}
        self.ranks = {}
        for rank, merge in enumerate(MERGES):
            left, right = merge.rsplit(" ", 1)
            left, right = left.encode()[-1:] if left.isspace() else left.encode(), right.encode()
            self.ranks[self.ids[left], self.ids[right]] = (rank, len(self.pieces))
            self.ids[left + right] = len(self.pieces)
            self.pieces.append(left + right)

    def words(self, text):
        return re.findall(r" ?[^ ]+| +", text, flags=re.S)

    def merge(self, symbols):
        n = len(symbols)
        after, before = [*range(1, n), -1], list(range(-1, n - 1))
        heap = []

        def offer(i):
            if i >= 0 and after[i] >= 0:
                pair = symbols[i], symbols[after[i]]
                if pair in self.ranks:
                    heapq.heappush(heap, (self.ranks[pair][0], i, pair))

        for i in range(n):
            offer(i)
        while heap:
            _, i, (left, right) = heapq.heappop(heap)
            j = after[i]
            if j < 0 or (symbols[i], symbols[j]) != (left, right):
                continue  # stale
            symbols[i], symbols[j] = self.ranks[left, right][1], None
            after[i] = after[j]
            if after[j] >= 0:
                before[after[j]] = i
            offer(before[i])
            offer(i)
        return [s for s in symbols if s is not None]

    def encode(self, text):
        return [s for word in self.words(text) for s in self.merge(list(word.encode("utf-8")))]

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


subject = Subject(kind="tokenizer", build=lambda c: Tokenizer(), forward=lambda m, text: m.encode(text), decode=lambda m, ids: m.decode(list(ids)),
                  declares={"algorithm": "bpe", "byte_level": True, "reversible": True})
