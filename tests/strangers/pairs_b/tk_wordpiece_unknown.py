"""BERT's WordPiece: greedy longest match first; a word that cannot be covered becomes [UNK] as a whole."""
import re

from veriformer.properties import Subject

PIECES = ["[UNK]", *"abcdefghilmnoprstuwy", *("##" + x for x in "abcdefghilmnoprstuwy"), "the", "un", "low", "new", "wide",
          "play", "##er", "##est", "##ing", "##ed", "##able", "##s", "afford", "##aff", ".", ",", "!", "?"]


class WordPiece:
    def __init__(self, bad):
        self.vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(PIECES))}
        self.bad = bad

    def words(self, text):
        return re.findall(r"\w+|[^\w\s]", text.lower())

    def segment(self, word):
        out, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = ("##" if start else "") + word[start:end]
                if piece in self.vocabulary:
                    out.append(piece)
                    start = end
                    break
            else:
                return [*out, "[UNK]"] if self.bad else ["[UNK]"]
        return out

    def encode(self, text):
        return [self.vocabulary[piece] for word in self.words(text) for piece in self.segment(word)]


def subject(bad):
    return Subject(
        kind="tokenizer", build=lambda c: WordPiece(bad), forward=lambda m, text: m.encode(text),
        vocabulary=lambda m: m.vocabulary, words=lambda m, text: [list(word) for word in m.words(text)],
        declares={"algorithm": "wordpiece", "unknown_id": 0, "byte_level": False, "reversible": False})


right, wrong = subject(False), subject(True)
WHAT = "A word whose rest cannot be covered keeps the pieces found so far before [UNK] instead of becoming [UNK] as a whole."
PLACE = "WordPiece segmentation (unknown words)"
