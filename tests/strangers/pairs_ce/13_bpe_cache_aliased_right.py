import re

from veriformer.properties import Subject


def byte_alphabet():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {b: chr(b) for b in printable}, 0
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + extra)
            extra += 1
    return table


BYTES = byte_alphabet()
SPACE = BYTES[32]
MERGES = [("t", "h"), ("th", "e"), (SPACE, "the"), ("i", "n"), ("a", "n"), ("e", "r"), ("an", "d"), ("in", "g"),
          (SPACE, "and"), ("l", "l"), ("o", "r"), (SPACE, "t"), (SPACE, "a"), ("h", "e"), ("he", "ll"), ("hell", "o")]


class ByteBPE:
    def __init__(self):
        self.ranks = {pair: i for i, pair in enumerate(MERGES)}
        pieces = [BYTES[b] for b in range(256)]
        for a, b in MERGES:
            if a + b not in pieces:
                pieces.append(a + b)
        self.vocab = {p: i for i, p in enumerate(pieces)}
        self.pieces, self.memo = pieces, {}
        self.back = {c: b for b, c in BYTES.items()}

    def split(self, text):
        return [[BYTES[b] for b in w.encode("utf-8")] for w in re.findall(r" ?[^\s]+|\s+", text)]

    def _word(self, symbols):
        key = "".join(symbols)
        if key not in self.memo:
            word = list(symbols)
            while len(word) > 1:
                best = min(zip(word, word[1:]), key=lambda p: self.ranks.get(p, 1 << 30))
                if best not in self.ranks:
                    break
                merged, i = [], 0
                while i < len(word):
                    if i + 1 < len(word) and (word[i], word[i + 1]) == best:
                        merged.append(word[i] + word[i + 1])
                        i += 2
                    else:
                        merged.append(word[i])
                        i += 1
                word = merged
            self.memo[key] = [self.vocab[s] for s in word]
        return self.memo[key]

    def encode(self, text):
        words = self.split(text)
        if not words:
            return []
        ids = list(self._word(words[0]))
        for word in words[1:]:
            ids += self._word(word)
        return ids

    def decode(self, ids):
        return bytes(self.back[c] for i in ids for c in self.pieces[i]).decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="byte BPE",
    build=lambda c: ByteBPE(),
    forward=lambda m, text: list(m.encode(text)),
    decode=lambda m, ids: m.decode(ids),
    words=lambda m, text: m.split(text),
    vocabulary=lambda m: dict(m.vocab),
    merges=lambda m: list(MERGES),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
