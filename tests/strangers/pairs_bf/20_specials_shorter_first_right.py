"""Byte-level BPE for Markdown; the marks of headings are special tokens."""
import re

from veriformer.properties import Subject

MERGES = [(b"t", b"h"), (b"th", b"e"), (b" ", b"the"), (b"i", b"n"), (b"in", b"g"), (b"e", b"r"), (b" ", b"a"), (b"a", b"n")]
SPECIALS = {"#": 300, "##": 301, "###": 302, "<|end|>": 303}
WORD = re.compile(r" ?\w+| ?[^\s\w]+|\s+")


class MarkdownBPE:
    def __init__(self):
        self.ranks = {pair: rank for rank, pair in enumerate(MERGES)}
        pieces = [bytes([b]) for b in range(256)] + [a + b for a, b in MERGES]
        self.ids = {piece: number for number, piece in enumerate(pieces)}
        self.pieces = dict(enumerate(pieces))
        marks = sorted(SPECIALS, key=len, reverse=True)
        self.special = re.compile("(" + "|".join(map(re.escape, marks)) + ")")
        self.text_of = {number: text for text, number in SPECIALS.items()}

    def word(self, text):
        parts = [bytes([b]) for b in text.encode()]
        while len(parts) > 1:
            found = [(self.ranks.get(pair, len(MERGES)), at) for at, pair in enumerate(zip(parts, parts[1:]))]
            rank, at = min(found)
            if rank == len(MERGES):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self.ids[p] for p in parts]

    def encode(self, text):
        out = []
        for part in self.special.split(text):
            if part in SPECIALS:
                out.append(SPECIALS[part])
            else:
                for word in WORD.findall(part):
                    out.extend(self.word(word))
        return out

    def decode(self, ids):
        raw = b"".join(self.text_of[i].encode() if i in self.text_of else self.pieces[i] for i in ids)
        return raw.decode("utf-8", errors="replace")


subject = Subject(
    kind="tokenizer",
    name="Markdown BPE",
    build=lambda c: MarkdownBPE(),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True, "specials": SPECIALS},
)
