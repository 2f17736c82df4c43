WHAT = "line 68: every piece is decoded from UTF-8 for itself before the texts are joined, so a character whose bytes lie in several pieces comes back as replacement characters"
"""A byte-level BPE tokenizer, trained when it is made."""

from collections import Counter

from veriformer.properties import Subject

CORPUS = """the quick brown fox jumps over the lazy dog; the dog sleeps, the fox goes on.
a transformer reads the text piece by piece, and the pieces are the pairs that were seen most often.
there is nothing that bytes cannot spell: the words, the numbers 0123456789, and whatever comes after them."""


def split_words(text):
    """Cut before each space that follows something else: nothing is lost, ''.join(words) is the text."""
    words, start = [], 0
    for i in range(1, len(text)):
        if text[i] == " " and text[i - 1] != " ":
            words.append(text[start:i])
            start = i
    words.append(text[start:])
    return [word for word in words if word]


def merge(symbols, pair, new):
    out, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out


class ByteBPE:
    def __init__(self, corpus, num_merges):
        self.pieces = [bytes([b]) for b in range(256)]
        self.rank = {}
        words = Counter(split_words(corpus))
        split = {word: list(word.encode("utf-8")) for word in words}
        for _ in range(num_merges):
            pairs = Counter()
            for word, count in words.items():
                for pair in zip(split[word], split[word][1:]):
                    pairs[pair] += count
            if not pairs:
                break
            best = max(pairs, key=lambda pair: (pairs[pair], pair))
            new = len(self.pieces)
            self.pieces.append(self.pieces[best[0]] + self.pieces[best[1]])
            self.rank[best] = new
            split = {word: merge(symbols, best, new) for word, symbols in split.items()}

    def encode(self, text):
        ids = []
        for word in split_words(text):
            symbols = list(word.encode("utf-8"))
            while len(symbols) > 1:
                pair = min(zip(symbols, symbols[1:]), key=lambda p: self.rank.get(p, float("inf")))
                if pair not in self.rank:
                    break
                symbols = merge(symbols, pair, self.rank[pair])
            ids += symbols
        return ids

    def decode(self, ids):
        return "".join(self.pieces[i].decode("utf-8", errors="replace") for i in ids)


subject = Subject(
    kind="tokenizer",
    name="byte BPE",
    build=lambda c: ByteBPE(CORPUS, num_merges=60),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
