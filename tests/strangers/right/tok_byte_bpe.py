"""Byte-level BPE in GPT-2's manner: bytes as printable characters, words by a regular expression, lowest rank merged first.

Unusual: nothing but `re`, so the expression spells letters as [^\\W\\d_]; in training the most frequent pair wins and of equally
frequent ones the smaller in order; a pair that occurs once is not merged. Lone surrogates survive (surrogatepass).
"""

import re
from collections import Counter
from functools import lru_cache

from veriformer.properties import Subject

WORD = re.compile(r" ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
SPECIAL = "<|endoftext|>"
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "attention is all you need: the transformer attends to the tokens it has seen.",
    "lower lowest newer newest wider widest; the lower the newer the wider.",
    "there and then the other mother and another brother gather together.",
]


def bytes_to_unicode():
    bs = list(range(ord("!"), ord("~") + 1)) + list(range(ord("¡"), ord("¬") + 1)) + list(range(ord("®"), ord("ÿ") + 1))
    cs = bs[:]
    n = 0
    for b in range(256):
        if b not in bs:
            bs.append(b)
            cs.append(256 + n)
            n += 1
    return dict(zip(bs, map(chr, cs)))


BYTE_TO_CHAR = bytes_to_unicode()
CHAR_TO_BYTE = {c: b for b, c in BYTE_TO_CHAR.items()}


def symbols_of(word):
    return tuple(BYTE_TO_CHAR[b] for b in word.encode("utf-8", "surrogatepass"))


def merge(symbols, pair):
    out, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            out.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return tuple(out)


class ByteBPE:
    def __init__(self, merges):
        self.merge_list = list(merges)
        self.ranks = {pair: i for i, pair in enumerate(self.merge_list)}
        pieces = [BYTE_TO_CHAR[b] for b in range(256)] + [a + b for a, b in self.merge_list]
        self.encoder = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
        self.special_id = len(self.encoder)
        self.decoder = {i: piece for piece, i in self.encoder.items()}
        self.bpe = lru_cache(maxsize=2048)(self._bpe)

    def __deepcopy__(self, memo):
        return ByteBPE(self.merge_list)

    def _bpe(self, word):
        symbols = symbols_of(word)
        while len(symbols) > 1:
            best = min(zip(symbols, symbols[1:]), key=lambda pair: self.ranks.get(pair, float("inf")))
            if best not in self.ranks:
                break
            symbols = merge(symbols, best)
        return symbols

    def encode(self, text):
        ids = []
        for i, part in enumerate(text.split(SPECIAL)):
            if i:
                ids.append(self.special_id)
            for word in WORD.findall(part):
                ids.extend(self.encoder[piece] for piece in self.bpe(word))
        return ids

    def decode(self, ids):
        out = bytearray()
        for i in ids:
            if i == self.special_id:
                out += SPECIAL.encode()
            else:
                out += bytes(CHAR_TO_BYTE[c] for c in self.decoder[i])
        try:
            return out.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return out.decode("utf-8", "replace")

    @classmethod
    def train(cls, texts, vocab_size):
        counts = Counter(w for text in texts for part in text.split(SPECIAL) for w in WORD.findall(part))
        words = {w: symbols_of(w) for w in counts}
        merges, made = [], {BYTE_TO_CHAR[b] for b in range(256)}
        while len(made) + 1 < vocab_size:  # one for the special token
            pairs = Counter()
            for w, symbols in words.items():
                for pair in zip(symbols, symbols[1:]):
                    pairs[pair] += counts[w]
            if not pairs:
                break
            best = min(pairs, key=lambda pair: (-pairs[pair], pair))
            if pairs[best] < 2:
                break
            merges.append(best)
            made.add(best[0] + best[1])
            words = {w: merge(symbols, best) for w, symbols in words.items()}
        return cls(merges)


COMMON = dict(
    kind="tokenizer",
    build=lambda c: ByteBPE.train(CORPUS, 320),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    train=ByteBPE.train,
    words=lambda m, text: [list(symbols_of(w)) for part in text.split(SPECIAL) for w in WORD.findall(part)],
    vocabulary=lambda m: {**m.encoder, SPECIAL: m.special_id},
    merges=lambda m: list(m.merge_list),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "algorithm": "bpe",
        "byte_level": True,
        "reversible": True,
        "specials": {SPECIAL: ByteBPE.train(CORPUS, 320).special_id},
    },
)
