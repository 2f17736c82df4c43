"""Byte-level BPE; encoding by a heap of pairs over a linked list, as fast tokenizers do it."""
import heapq
import re
from collections import Counter

from veriformer.properties import Subject

CORPUS = (
    "the cat and the rat that sat there ate the other oats while another hen then heard her father gather feathers "
    "in these hot months nothing rather bothers the thin heather than a northern weather that hates the earth "
    "banana bandana ananas cabana aaa aaaa aaaaa abab ababab baba babab aab aabb abaab baab " * 3
)
END = "<|end|>"
SPLIT = re.compile(r" ?\S+|\s")


def symbols(word):
    return [chr(b) for b in word.encode("utf-8", "surrogatepass")]


class HeapBPE:
    def __init__(self, merges=80):
        words = Counter(SPLIT.findall(CORPUS))
        work = [(symbols(w), n) for w, n in words.items()]
        self.merges = []
        for _ in range(merges):
            pairs = Counter()
            for parts, n in work:
                for pair in zip(parts, parts[1:]):
                    pairs[pair] += n
            best = min(pairs, key=lambda p: (-pairs[p], p))
            self.merges.append(best)
            work = [(self.joined(parts, best), n) for parts, n in work]
        self.rank = {pair: i for i, pair in enumerate(self.merges)}
        self.vocabulary = {chr(b): b for b in range(256)}
        for a, b in self.merges:
            self.vocabulary.setdefault(a + b, len(self.vocabulary))
        self.pieces = {i: p for p, i in self.vocabulary.items()}
        self.end = len(self.vocabulary)
        self.vocabulary[END] = self.end

    @staticmethod
    def joined(parts, pair):
        out, i = [], 0
        while i < len(parts):
            if i + 1 < len(parts) and (parts[i], parts[i + 1]) == pair:
                out.append(parts[i] + parts[i + 1])
                i += 2
            else:
                out.append(parts[i])
                i += 1
        return out

    def segment(self, word):
        part = symbols(word)
        after = [*range(1, len(part)), -1]
        before = [*range(-1, len(part) - 1)]
        heap = []

        def offer(i):
            if i >= 0 and after[i] >= 0:
                rank = self.rank.get((part[i], part[after[i]]))
                if rank is not None:
                    heapq.heappush(heap, (rank, i))

        for i in range(len(part)):
            offer(i)
        while heap:
            rank, i = heapq.heappop(heap)
            if part[i] is None or after[i] < 0:
                continue
            j = after[i]
            if self.rank.get((part[i], part[j])) != rank:
                continue  # an entry of before, its pair is gone
            part[i], part[j] = part[i] + part[j], None
            after[i] = after[j]
            if after[j] >= 0:
                before[after[j]] = i
            offer(before[i])
            offer(i)
        return [p for p in part if p is not None]

    def encode(self, text):
        ids = []
        for n, plain in enumerate(text.split(END)):
            ids += [self.end] * (n > 0)
            for word in SPLIT.findall(plain):
                ids += [self.vocabulary[p] for p in self.segment(word)]
        return ids

    def decode(self, ids):
        data = b"".join(END.encode() if i == self.end else self.pieces[i].encode("latin-1") for i in ids)
        return data.decode("utf-8", "surrogatepass")


subject = Subject(
    kind="tokenizer",
    name="heap bpe",
    build=lambda c: HeapBPE(),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    vocabulary=lambda m: m.vocabulary,
    merges=lambda m: m.merges,
    words=lambda m, text: [symbols(w) for w in SPLIT.findall(text)],
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True, "specials": {END: 336}},
)
