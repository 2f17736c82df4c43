import math
import re

import torch
from torch import nn

from veriformer.properties import Subject

class Net:
    """Byte-level BPE: ids 0..255 are bytes, then one id a merge in the order of learning."""
    merges = [(104, 101), (108, 108), (256, 257), (258, 111), (32, 116), (260, 104), (105, 110), (32, 97)]

    def __init__(self, c, bug):
        self.words = re.compile(r" ?[^\W\d_]+| ?\d+| ?[^\s\w]+| ?_+|\s+(?!\S)" + ("" if bug else r"|\s+"))
        self.rank = {pair: i for i, pair in enumerate(self.merges)}
        self.bytes = {i: bytes([i]) for i in range(256)}
        for i, (a, b) in enumerate(self.merges):
            self.bytes[256 + i] = self.bytes[a] + self.bytes[b]

    def piece(self, word):
        ids = list(word.encode("utf-8"))
        while len(ids) > 1:
            best = min(zip(ids, ids[1:]), key=lambda pair: self.rank.get(pair, math.inf))
            if best not in self.rank:
                break
            out, i = [], 0
            while i < len(ids):
                if tuple(ids[i:i + 2]) == best:
                    out.append(256 + self.rank[best])
                    i += 2
                else:
                    out.append(ids[i])
                    i += 1
            ids = out
        return ids

    def encode(self, text):
        return [i for word in self.words.findall(text) for i in self.piece(word)]

    def decode(self, ids):
        return b"".join(self.bytes[i] for i in ids).decode("utf-8", errors="replace")


WHAT = "The pre-tokeniser's pattern lacks its last alternative (\\s+), so a tab or newline before a word, and blanks that lead no word, are dropped from the text."
PLACE = 'pre-tokenisation pattern of the tokenizer'


def make(bug):
    return Subject(
        kind="tokenizer",
        build=lambda c: Net(c, bug),
        forward=lambda m, text: m.encode(text),
        declares={'algorithm': 'bpe', 'byte_level': True, 'reversible': True},
        decode=lambda m, ids: m.decode(ids),
    )


right, wrong = make(False), make(True)
