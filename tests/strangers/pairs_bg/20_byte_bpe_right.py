"""A byte-level BPE for a course, after minbpe."""

from veriformer.properties import Subject

CORPUS = ["the theme of the thesis is the thing that they think about", "naïve café, größer, señor: über alles 日本 日本語"]


def count_pairs(ids, counts):
    for pair in zip(ids, ids[1:]):
        counts[pair] = counts.get(pair, 0) + 1


def merge(ids, pair, new):
    out, i = [], 0
    while i < len(ids):
        if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


class ByteBPE:
    def __init__(self, merges=()):
        self.ranks = {pair: 256 + n for n, pair in enumerate(merges)}
        self.pieces = {i: bytes([i]) for i in range(256)}
        for (a, b), new in self.ranks.items():
            self.pieces[new] = self.pieces[a] + self.pieces[b]

    @classmethod
    def train(cls, texts, vocab_size):
        rows, merges = [list(text.encode("utf-8")) for text in texts], []
        while 256 + len(merges) < vocab_size:
            counts = {}
            for row in rows:
                count_pairs(row, counts)
            if not counts:
                break
            best = min(counts, key=lambda pair: (-counts[pair], pair))
            rows = [merge(row, best, 256 + len(merges)) for row in rows]
            merges.append(best)
        return cls(merges)

    def encode(self, text):
        ids = list(text.encode("utf-8"))
        while len(ids) >= 2:
            pair = min(zip(ids, ids[1:]), key=lambda p: self.ranks.get(p, float("inf")))
            if pair not in self.ranks:
                break
            ids = merge(ids, pair, self.ranks[pair])
        return ids

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: ByteBPE.train(CORPUS, 280),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    train=ByteBPE.train,
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
