WHAT = "the encoder merges the first pair from the left that has a merge, not the pair of the lowest rank, so words are cut otherwise than in training (line 72: word = self.join(word, known[0]))"
import torch
import torch.nn as nn

from veriformer.properties import Subject


from collections import Counter
import re

TEXT = "low lower lowest newer newest wider widest the other weather there then hot hotter water later latter letter " * 3


def byte_alphabet():
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 0
    for b in range(256):
        table[b] = chr(b) if b in keep else chr(256 + extra)
        extra += b not in keep
    return table


class ByteBPE(nn.Module):
    def __init__(self, texts=(TEXT,), vocab_size=300):
        super().__init__()
        self.byte_to_char = byte_alphabet()
        self.char_to_byte = {c: b for b, c in self.byte_to_char.items()}
        self.merges = self.learn(texts, vocab_size - 256)
        self.ranks = {pair: n for n, pair in enumerate(self.merges)}
        pieces = [*self.byte_to_char.values(), *(a + b for a, b in self.merges)]
        self.vocab = {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}
        self.pieces = {n: piece for piece, n in self.vocab.items()}

    def split(self, text):
        return [[self.byte_to_char[b] for b in w.encode()] for w in re.findall(r" ?\S+|\s+", text)]

    @staticmethod
    def join(word, pair):
        out, i = [], 0
        while i < len(word):
            if tuple(word[i : i + 2]) == pair:
                out.append(word[i] + word[i + 1])
                i += 2
            else:
                out.append(word[i])
                i += 1
        return out

    def learn(self, texts, steps):
        words = Counter(tuple(w) for t in texts for w in self.split(t))
        merges = []
        for _ in range(steps):
            pairs = Counter()
            for w, n in words.items():
                for pair in zip(w, w[1:]):
                    pairs[pair] += n
            if not pairs:
                break
            best = min(pairs, key=lambda p: (-pairs[p], p))
            merges.append(best)
            again = Counter()
            for w, n in words.items():
                again[tuple(self.join(w, best))] += n
            words = again
        return merges

    def bpe(self, word):
        while True:
            known = [pair for pair in zip(word, word[1:]) if pair in self.ranks]
            if not known:
                return word
            word = self.join(word, known[0])

    def encode(self, text):
        return [self.vocab[piece] for word in self.split(text) for piece in self.bpe(word)]

    def decode(self, ids):
        return bytes(self.char_to_byte[c] for n in ids for c in self.pieces[int(n)]).decode(errors="replace")


subject = Subject(
    kind="tokenizer",
    build=lambda c: ByteBPE(),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    words=lambda m, text: m.split(text),
    vocabulary=lambda m: m.vocab,
    merges=lambda m: m.merges,
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
