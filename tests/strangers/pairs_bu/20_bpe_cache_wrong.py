WHAT = 'the cache of segmented words is keyed by the word without its white space, so a word that came once without a leading space is encoded without it ever after, and white space of all kinds is one entry (line 50)'
import re
from collections import Counter

from veriformer.properties import Subject

CORPUS = "the lower the newer, the newest of the low and the wider river; so low, so slow the flow is " * 3
SPLIT = re.compile(r" ?[^\s]+|\s+")


class ByteBPE:
    """Byte-level BPE; a piece is the string of its bytes, one character (latin-1) a byte."""

    def __init__(self, num_merges=30):
        self.ranks = {}
        self.cache = {}
        counts = Counter(SPLIT.findall(CORPUS))
        words = {word: self.symbols(word) for word in counts}
        for _ in range(num_merges):
            pairs = Counter()
            for word, pieces in words.items():
                for pair in zip(pieces, pieces[1:]):
                    pairs[pair] += counts[word]
            if not pairs:
                break
            best = max(pairs, key=lambda pair: (pairs[pair], pair))
            self.ranks[best] = len(self.ranks)
            words = {word: self.merge(pieces, best) for word, pieces in words.items()}
        pieces = [chr(i) for i in range(256)] + ["".join(pair) for pair in self.ranks]
        self.pieces = list(dict.fromkeys(pieces))
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}

    @staticmethod
    def symbols(word):
        return list(word.encode("utf-8").decode("latin-1"))

    @staticmethod
    def merge(pieces, pair):
        out, i = [], 0
        while i < len(pieces):
            if tuple(pieces[i : i + 2]) == pair:
                out.append(pieces[i] + pieces[i + 1])
                i += 2
            else:
                out.append(pieces[i])
                i += 1
        return out

    def bpe(self, word):
        key = word.strip()
        if key in self.cache:
            return self.cache[key]
        pieces = self.symbols(word)
        while len(pieces) > 1:
            pair = min(zip(pieces, pieces[1:]), key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if pair not in self.ranks:
                break
            pieces = self.merge(pieces, pair)
        self.cache[key] = pieces
        return pieces

    def encode(self, text):
        return [self.ids[piece] for word in SPLIT.findall(text) for piece in self.bpe(word)]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids).encode("latin-1").decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    build=lambda c: ByteBPE(),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    words=lambda m, text: [m.symbols(word) for word in SPLIT.findall(text)],
    vocabulary=lambda m: dict(m.ids),
    merges=lambda m: list(m.ranks),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
