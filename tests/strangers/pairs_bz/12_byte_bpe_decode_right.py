"""minbpe: byte-level BPE; every byte is a token, so nothing is unknown and decoding gives the text back."""
from veriformer.properties import Subject

TEXT = "the cat and the hat and the caf\u00e9 on the na\u00efve \u00fcber stra\u00dfe, \u4f60\u597d \u4f60\u597d the end of the line " * 3


def get_stats(ids):
    counts = {}
    for pair in zip(ids, ids[1:]):
        counts[pair] = counts.get(pair, 0) + 1
    return counts


def merge(ids, pair, idx):
    new, i = [], 0
    while i < len(ids):
        if i < len(ids) - 1 and ids[i] == pair[0] and ids[i + 1] == pair[1]:
            new.append(idx)
            i += 2
        else:
            new.append(ids[i])
            i += 1
    return new


class BasicTokenizer:
    def __init__(self):
        self.merges = {}
        self.vocab = {i: bytes([i]) for i in range(256)}

    def train(self, text, vocab_size):
        ids = list(text.encode("utf-8"))
        for idx in range(256, vocab_size):
            stats = get_stats(ids)
            if not stats:
                break
            pair = max(stats, key=stats.get)
            ids = merge(ids, pair, idx)
            self.merges[pair] = idx
            self.vocab[idx] = self.vocab[pair[0]] + self.vocab[pair[1]]
        return self

    def encode(self, text):
        ids = list(text.encode("utf-8"))
        while len(ids) >= 2:
            stats = get_stats(ids)
            pair = min(stats, key=lambda p: self.merges.get(p, float("inf")))
            if pair not in self.merges:
                break
            ids = merge(ids, pair, self.merges[pair])
        return ids

    def decode(self, ids):
        return b"".join(self.vocab[i] for i in ids).decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="minbpe",
    build=lambda c: BasicTokenizer().train(TEXT, 276),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(list(ids)),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
