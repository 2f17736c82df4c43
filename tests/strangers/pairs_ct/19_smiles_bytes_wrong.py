"""Byte-level BPE, trained on a few molecules with their names."""
from collections import Counter

import torch  # noqa: F401

from veriformer.properties import Subject

CORPUS = ["CC(=O)Oc1ccccc1C(=O)O aspirin", "CN1C=NC2=C1C(=O)N(C(=O)N2C)C caffeine", "c1ccccc1 benzene", "CCO éthanol", "Cc1ccccc1O o-crésol"]


def join(ids, pair, new):
    out, i = [], 0
    while i < len(ids):
        if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


class SmilesBPE:
    def __init__(self, texts, rounds=24):
        self.pieces = [bytes([b]) for b in range(256)]
        self.rank = {}
        lines = [list(t.encode("utf-8")) for t in texts]
        for _ in range(rounds):
            counts = Counter(p for line in lines for p in zip(line, line[1:]))
            pair = max(counts, key=lambda p: (counts[p], -p[0], -p[1]))
            new = len(self.pieces)
            self.rank[pair] = new
            self.pieces.append(self.pieces[pair[0]] + self.pieces[pair[1]])
            lines = [join(line, pair, new) for line in lines]

    def encode(self, text):
        ids = list(text.encode("utf-8"))
        while len(ids) > 1:
            pair = min(zip(ids, ids[1:]), key=lambda p: self.rank.get(p, 1 << 30))
            if pair not in self.rank:
                break
            ids = join(ids, pair, self.rank[pair])
        return ids

    def decode(self, ids):
        return "".join(self.pieces[i].decode("utf-8", errors="replace") for i in ids)


subject = Subject(
    kind="tokenizer",
    name="smiles bpe",
    build=lambda c: SmilesBPE(CORPUS),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    declares={"byte_level": True, "reversible": True},
)

WHAT = 'Each piece is decoded for itself and the strings are joined (line 46), not the bytes: a letter whose bytes lie in several pieces comes back as replacement characters.'
