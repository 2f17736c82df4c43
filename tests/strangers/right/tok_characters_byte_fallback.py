"""Character tokenizer with byte fallback: known characters are pieces, any other is spelt by its UTF-8 bytes <0x00> ... <0xFF>.

Unusual: because of the fallback nothing is unknown and decoding gives back every text, to the letter. Bytes that form no
character decode to U+FFFD. Two special tokens are never cut; they are recognised before anything else, the longer name first.
"""

import re
import string

from veriformer.properties import Subject

SPECIALS = {"<s>": 0, "</s>": 1}
FIRST_BYTE = len(SPECIALS)
ALPHABET = string.ascii_letters + string.digits + " .,;:!?'\"-()\n" + "äöüßéè"


class CharTokenizer:
    def __init__(self):
        self.ids = dict(SPECIALS)
        for byte in range(256):
            self.ids[f"<0x{byte:02X}>"] = FIRST_BYTE + byte
        for char in ALPHABET:
            self.ids.setdefault(char, len(self.ids))
        self.chars = {i: piece for piece, i in self.ids.items()}
        names = sorted(SPECIALS, key=len, reverse=True)
        self.split = "(" + "|".join(map(re.escape, names)) + ")"

    def encode(self, text):
        ids = []
        for part in re.split(self.split, text):
            if part in SPECIALS:
                ids.append(SPECIALS[part])
                continue
            for char in part:
                if char in ALPHABET:
                    ids.append(self.ids[char])
                else:
                    ids.extend(FIRST_BYTE + byte for byte in char.encode("utf-8", "surrogatepass"))
        return ids

    def decode(self, ids):
        text, pending = [], bytearray()

        def flush():
            try:
                text.append(pending.decode("utf-8", "surrogatepass"))
            except UnicodeDecodeError:
                text.append(pending.decode("utf-8", "replace"))
            pending.clear()

        for i in ids:
            if FIRST_BYTE <= i < FIRST_BYTE + 256:
                pending.append(i - FIRST_BYTE)
            else:
                flush()
                text.append(self.chars[i])
        flush()
        return "".join(text)


COMMON = dict(
    kind="tokenizer",
    build=lambda c: CharTokenizer(),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    vocabulary=lambda m: dict(m.ids),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={"algorithm": "other", "byte_level": True, "reversible": True, "specials": dict(SPECIALS)},
)
