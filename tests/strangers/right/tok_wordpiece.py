"""WordPiece as in BERT: words at spaces and punctuation, then the longest piece that fits from the left, ## inside a word.

Unusual: text is neither lowered nor stripped of accents; a word with any part that no piece covers, or longer than 100 characters,
is one [UNK] as a whole. Decoding joins pieces with spaces, so spacing is not given back.
"""

import unicodedata

from veriformer.properties import Subject

UNK = "[UNK]"
PIECES = (
    "[PAD] [UNK] [CLS] [SEP] a b c d e f g h i j k l m n o p q r s t u v w x y z "
    "##a ##b ##c ##d ##e ##f ##g ##h ##i ##j ##k ##l ##m ##n ##o ##p ##q ##r ##s ##t ##u ##v ##w ##x ##y ##z "
    "A T W . , ! ? ; : - ' 0 1 2 3 ##0 ##1 ##2 ##3 the and un play token ##ing ##ed "
    "##able ##aff ##izer ##er ##est low new wid trans ##form at ##tention hug is all you need"
).split()


def is_punctuation(char):
    code = ord(char)
    if 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126:
        return True
    return unicodedata.category(char).startswith("P")


def basic_words(text):
    word = ""
    for char in text:
        if char.isspace():
            if word:
                yield word
            word = ""
        elif is_punctuation(char):
            if word:
                yield word
            yield char
            word = ""
        else:
            word += char
    if word:
        yield word


class WordPiece:
    def __init__(self, pieces=PIECES, longest_word=100):
        self.vocab = {}
        for piece in pieces:
            self.vocab.setdefault(piece, len(self.vocab))
        self.names = {i: piece for piece, i in self.vocab.items()}
        self.longest_word = longest_word

    def pieces(self, word):
        if len(word) > self.longest_word:
            return [UNK]
        found, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = word[start:end] if start == 0 else "##" + word[start:end]
                if piece in self.vocab:
                    found.append(piece)
                    start = end
                    break
            else:
                return [UNK]
        return found

    def encode(self, text):
        return [self.vocab[piece] for word in basic_words(text) for piece in self.pieces(word)]

    def decode(self, ids):
        return " ".join(self.names[i] for i in ids).replace(" ##", "")


COMMON = dict(
    kind="tokenizer",
    build=lambda c: WordPiece(),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    vocabulary=lambda m: dict(m.vocab),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={"algorithm": "wordpiece", "byte_level": False, "reversible": False, "unknown_id": PIECES.index(UNK)},
)
