WHAT = 'the search for the longest piece stops at two characters (range ends at start + 1), so pieces of one character are never found and such words become unknown (line 20: for end in range(len(word), start + 1, -1):)'
"""WordPiece: the longest piece first, words split at white space."""
from veriformer.properties import Subject

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["the", "un", "aff", "able", "token", "trans", "form", "play", "cat", "in"]
TAILS = ["##aff", "##able", "##ing", "##ed", "##er", "##former", "##ize", "##s", "##former"]


class WordPiece:
    def __init__(self):
        pieces = ["[UNK]"] + list(LETTERS) + ["##" + x for x in LETTERS] + WORDS + TAILS
        self.vocab = {}
        for p in pieces:
            self.vocab.setdefault(p, len(self.vocab))

    def word(self, word):
        ids, start = [], 0
        while start < len(word):
            for end in range(len(word), start + 1, -1):
                piece = word[start:end] if start == 0 else "##" + word[start:end]
                if piece in self.vocab:
                    ids.append(self.vocab[piece])
                    start = end
                    break
            else:
                return [self.vocab["[UNK]"]]
        return ids

    def encode(self, text):
        return [i for w in text.split() for i in self.word(w)]


subject = Subject(
    kind="tokenizer",
    name="WordPiece",
    build=lambda c: WordPiece(),
    forward=lambda model, text: model.encode(text),
    vocabulary=lambda model: model.vocab,
    declares={"algorithm": "wordpiece", "byte_level": False, "reversible": False, "unknown_id": 0},
)
