"""Byte-level BPE with a cache of words, as GPT-2's encoder has it."""

import re
from collections import Counter

from veriformer.properties import Subject

CORPUS = """
low lower lowest new newer newest wide wider widest
the lower the rate the newer the run, the wider the net the slower the loss falls
a checkpoint that was saved is a checkpoint that can be loaded, and the loss goes on where it was
""" * 3

WORDS = re.compile(r" ?\S+|\s+(?!\S)|\s+")


class ByteBPE:
    def __init__(self, corpus=CORPUS, num_merges=60):
        self.pieces = [bytes([b]) for b in range(256)]
        self.ranks = {}
        self.cache = {}
        self._train(corpus, num_merges)

    def _train(self, corpus, num_merges):
        words = {tuple(w.encode()): n for w, n in Counter(WORDS.findall(corpus)).items()}
        for _ in range(num_merges):
            pairs = Counter()
            for ids, n in words.items():
                for pair in zip(ids, ids[1:]):
                    pairs[pair] += n
            if not pairs:
                break
            best = min(pairs, key=lambda pair: (-pairs[pair], pair))
            new = len(self.pieces)
            self.ranks[best] = new
            self.pieces.append(self.pieces[best[0]] + self.pieces[best[1]])
            words = {tuple(self._merge(ids, best, new)): n for ids, n in words.items()}

    @staticmethod
    def _merge(ids, pair, new):
        out, i = [], 0
        while i < len(ids):
            if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
                out.append(new)
                i += 2
            else:
                out.append(ids[i])
                i += 1
        return out

    def _bpe(self, word):
        key = word
        if key in self.cache:
            return self.cache[key]
        ids = list(word.encode("utf-8"))
        while len(ids) > 1:
            pair = min(zip(ids, ids[1:]), key=lambda p: self.ranks.get(p, float("inf")))
            if pair not in self.ranks:
                break
            ids = self._merge(ids, pair, self.ranks[pair])
        self.cache[key] = ids
        return ids

    def encode(self, text):
        return [i for word in WORDS.findall(text) for i in self._bpe(word)]

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte-level BPE",
    build=lambda c: ByteBPE(),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
