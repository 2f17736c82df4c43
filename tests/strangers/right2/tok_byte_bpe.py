"""Byte-level BPE in 40 lines, trained on a few words; pieces are written in latin-1, one character a byte. Unusual: ids of
merged pieces follow the 256 bytes; right, as in minbpe."""
import re
from collections import Counter
from veriformer.properties import Subject

CORPUS = ["the cat sat on the mat", "the dog ate the other cat", "low lower lowest new newer newest", "naïve café über straße"]


class BPE:
    def __init__(s, merges):
        s.merges, s.rank = merges, {p: i for i, p in enumerate(merges)}
        s.vocab = {chr(i): i for i in range(256)}
        for a, b in merges:
            s.vocab.setdefault(a + b, len(s.vocab))
        s.pieces = {i: p for p, i in s.vocab.items()}

    @staticmethod
    def words(text):
        return [list(w.encode("utf-8", "surrogatepass").decode("latin-1")) for w in re.findall(r" ?\S+|\s+", text)]

    def segment(s, word):
        while len(word) > 1:
            best = min(zip(word, word[1:]), key=lambda p: s.rank.get(p, 1 << 30))
            if best not in s.rank:
                break
            word = merge(word, best)
        return word

    def encode(s, text):
        return [s.vocab[p] for w in s.words(text) for p in s.segment(w)]

    def decode(s, ids):
        raw = "".join(s.pieces[int(i)] for i in ids).encode("latin-1")
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return raw.decode("utf-8", "replace")


def merge(word, pair):
    out, i = [], 0
    while i < len(word):
        if tuple(word[i:i + 2]) == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def train(texts, size):
    counts = Counter(tuple(w) for t in texts for w in BPE.words(t))
    words, merges, seen = [(list(w), n) for w, n in counts.items()], [], set(map(chr, range(256)))
    while len(seen) < size:
        pairs = Counter()
        for w, n in words:
            for p in zip(w, w[1:]):
                pairs[p] += n
        if not pairs:
            break
        best = max(pairs, key=lambda p: (pairs[p], p))
        merges.append(best)
        seen.add(best[0] + best[1])
        words = [(merge(w, best), n) for w, n in words]
    return BPE(merges)


args = dict(kind="tokenizer", build=lambda c: train(CORPUS, 290), forward=lambda m, text: m.encode(text), decode=lambda m, ids: m.decode(ids),
            words=lambda m, text: m.words(text), vocabulary=lambda m: dict(m.vocab), merges=lambda m: list(m.merges), train=train)
undeclared = Subject(**args)
declared = Subject(**args, declares={"algorithm": "bpe", "byte_level": True, "reversible": True})
