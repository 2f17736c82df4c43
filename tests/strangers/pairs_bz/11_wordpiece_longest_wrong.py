WHAT = "The longest candidate is taken from pieces that begin a word alone, so longer ## pieces are never tried and a word is cut into shorter ones (line 17)"
"""WordPiece: greedy, the longest piece that matches first."""
from veriformer.properties import Subject

VOCAB = ["[PAD]", "[UNK]", "un", "##aff", "##able", "##a", "##b", "##l", "##e", "##f", "##s", "##t", "##i", "##n",
         "##o", "##ation", "##ationally", "##y", "a", "b", "n", "nat", "st", "i", "in", "f", "s", "t", "e", "l", "o",
         "##st", "##abl", "fun", "u"]


class WordPiece:
    def __init__(self, vocab, unk="[UNK]", prefix="##"):
        self.vocab = {piece: i for i, piece in enumerate(vocab)}
        self.unk = self.vocab[unk]
        self.prefix = prefix
        self.specials = {"[PAD]", "[UNK]"}
        # no need to try candidates that are longer than every piece
        self.longest = max(len(p) for p in vocab if p not in self.specials and not p.startswith(prefix))

    def words(self, text):
        return text.split()

    def encode_word(self, word):
        ids, start = [], 0
        while start < len(word):
            for end in range(min(len(word), start + self.longest), start, -1):
                piece = (self.prefix if start else "") + word[start:end]
                if piece in self.vocab and piece not in self.specials:
                    ids.append(self.vocab[piece])
                    start = end
                    break
            else:
                return [self.unk]
        return ids

    def encode(self, text):
        return [i for word in self.words(text) for i in self.encode_word(word)]


subject = Subject(
    kind="tokenizer",
    name="wordpiece",
    build=lambda c: WordPiece(VOCAB),
    forward=lambda m, text: m.encode(text),
    words=lambda m, text: [list(w) for w in m.words(text)],
    vocabulary=lambda m: dict(m.vocab),
    declares={"algorithm": "wordpiece", "unknown_id": 1},
)
