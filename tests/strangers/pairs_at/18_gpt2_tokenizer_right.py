"""A byte-level BPE after OpenAI's encoder.py (the pattern written for `re`), with special tokens and a cache of words."""

import re

from veriformer.properties import Subject

PATTERN = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
MERGES = (
    "Ġ t|h e|i n|Ġt he|a n|e r|o n|r e|Ġ a|n d|Ġa nd|o r|in g|i s|l l|o w|Ġ w|l o|lo w|Ġ s|e n|Ã ©|"
    "Ġ l|Ġl ow|low er|n e|ne w|w i|wi d|Ġ n|Ġn e|Ġne w|a t|c at|e s|es t"
)


def bytes_to_unicode():
    bs = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    cs = bs[:]
    for b in range(256):
        if b not in bs:
            bs.append(b)
            cs.append(256 + len(cs) - 188)
    return dict(zip(bs, map(chr, cs)))


class GPT2Tokenizer:
    def __init__(self):
        self.byte_encoder = bytes_to_unicode()
        self.byte_decoder = {c: b for b, c in self.byte_encoder.items()}
        self.merges = [tuple(m.split()) for m in MERGES.split("|")]
        self.bpe_ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        pieces = list(self.byte_encoder.values()) + ["".join(m) for m in self.merges]
        self.encoder = {piece: i for i, piece in enumerate(pieces)}
        self.specials = {"<|endoftext|>": len(self.encoder)}
        self.decoder = {i: piece for piece, i in self.encoder.items()}
        self.special_pattern = re.compile("(" + "|".join(map(re.escape, self.specials)) + ")")
        self.cache = {}

    def symbols(self, word):
        return [self.byte_encoder[b] for b in word.encode("utf-8")]

    def bpe(self, word):
        symbols = self.symbols(word)
        while len(symbols) > 1:
            pairs = set(zip(symbols, symbols[1:]))
            first, second = best = min(pairs, key=lambda pair: self.bpe_ranks.get(pair, len(self.bpe_ranks)))
            if best not in self.bpe_ranks:
                break
            merged, i = [], 0
            while i < len(symbols):
                if symbols[i : i + 2] == [first, second]:
                    merged.append(first + second)
                    i += 2
                else:
                    merged.append(symbols[i])
                    i += 1
            symbols = merged
        return [self.encoder[s] for s in symbols]

    def word_ids(self, word):
        if word not in self.cache:
            self.cache[word] = self.bpe(word)
        return self.cache[word]

    def encode_ordinary(self, text):
        words = PATTERN.findall(text)
        if not words:
            return []
        ids = list(self.word_ids(words[0]))
        for word in words[1:]:
            ids += self.word_ids(word)
        return ids

    def encode(self, text):
        ids = []
        for span in self.special_pattern.split(text):
            if span in self.specials:
                ids.append(self.specials[span])
            else:
                ids.extend(self.encode_ordinary(span))
        return ids

    def decode(self, ids):
        names = {i: name for name, i in self.specials.items()}
        data = b""
        for i in ids:
            if i in names:
                data += names[i].encode("utf-8")
            else:
                data += bytes(self.byte_decoder[c] for c in self.decoder[i])
        return data.decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="GPT-2 tokenizer",
    build=lambda c: GPT2Tokenizer(),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    words=lambda model, text: [model.symbols(word) for word in PATTERN.findall(text)],
    vocabulary=lambda model: {**model.encoder, **model.specials},
    merges=lambda model: list(model.merges),
    declares={
        "algorithm": "bpe",
        "byte_level": True,
        "reversible": True,
        "specials": {"<|endoftext|>": 256 + len(MERGES.split("|"))},
    },
)
