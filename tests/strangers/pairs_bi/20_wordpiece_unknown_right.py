from veriformer.properties import Subject

PIECES = ["[PAD]", "[UNK]"]
PIECES += list("abcdefghiklmnoprstuvw.,")
PIECES += ["##" + letter for letter in "abcdefghiklmnoprstuvw"]
PIECES += ["the", "at", "ten", "tion", "un", "aff", "trans", "form", "is", "token"]
PIECES += ["##the", "##ten", "##tion", "##aff", "##able", "##form", "##er", "##ers", "##s", "##ize", "##ing", "##ed"]
PIECES = list(dict.fromkeys(PIECES))


class WordPiece:
    """Greedy longest match first; a word with a part that no piece covers is unknown as a whole, as in BERT."""

    def __init__(self, pieces, unk="[UNK]"):
        self.vocab = {piece: i for i, piece in enumerate(pieces)}
        self.inverse = list(pieces)
        self.unk = unk

    def basic(self, text):
        for mark in ".,":
            text = text.replace(mark, f" {mark} ")
        return text.lower().split()

    def segment(self, word):
        pieces, start = [], 0
        while start < len(word):
            end = len(word)
            while end > start:
                piece = ("##" if start else "") + word[start:end]
                if piece in self.vocab:
                    break
                end -= 1
            else:
                return [self.unk]
            pieces.append(piece)
            start = end
        return pieces

    def encode(self, text):
        return [self.vocab[piece] for word in self.basic(text) for piece in self.segment(word)]

    def decode(self, ids):
        return " ".join(self.inverse[i] for i in ids).replace(" ##", "")


subject = Subject(
    kind="tokenizer",
    name="WordPiece",
    build=lambda c: WordPiece(PIECES),
    forward=lambda m, text: m.encode(text),
    decode=lambda m, ids: m.decode(ids),
    vocabulary=lambda m: dict(m.vocab),
    declares={"algorithm": "wordpiece", "reversible": False, "unknown_id": 1, "byte_level": False},
)
