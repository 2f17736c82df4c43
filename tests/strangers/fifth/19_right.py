"""WordPiece as in BERT's tokenization.py: the longest piece first, words that cannot be cut are unknown."""

import string
import unicodedata

from veriformer.properties import Subject

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = list(string.ascii_lowercase) + list(string.digits)
WHOLE = ["the", "un", "token", "attention", "play", "want", "a", "of", "is", "run", "trans", "form", "quick"]
TAILS = ["##ing", "##ed", "##able", "##aff", "##er", "##ers", "##ization", "##ize", "##former", "##s", "##ly", "##ning"]


def load_vocab():
    pieces = SPECIAL + LETTERS + ["##" + c for c in LETTERS] + list(string.punctuation) + WHOLE + TAILS
    return {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}


def whitespace_tokenize(text):
    return text.strip().split()


def is_punctuation(char):
    cp = ord(char)
    if 33 <= cp <= 47 or 58 <= cp <= 64 or 91 <= cp <= 96 or 123 <= cp <= 126:
        return True
    return unicodedata.category(char).startswith("P")


def split_on_punctuation(token):
    output, fresh = [], True
    for char in token:
        if is_punctuation(char):
            output.append([char])
            fresh = True
        else:
            if fresh:
                output.append([])
            fresh = False
            output[-1].append(char)
    return ["".join(chars) for chars in output]


class WordpieceTokenizer:
    def __init__(self, vocab, unk_token="[UNK]", max_input_chars_per_word=100):
        self.vocab = vocab
        self.inverse = {i: piece for piece, i in vocab.items()}
        self.unk_token = unk_token
        self.max_input_chars_per_word = max_input_chars_per_word

    def wordpiece(self, token):
        chars = list(token)
        if len(chars) > self.max_input_chars_per_word:
            return [self.unk_token]
        sub_tokens = []
        start = 0
        while start < len(chars):
            end = len(chars)
            cur_substr = None
            while start < end:
                substr = "".join(chars[start:end])
                if start > 0:
                    substr = "##" + substr
                if substr in self.vocab:
                    cur_substr = substr
                    break
                end -= 1
            if cur_substr is None:
                return [self.unk_token]
            sub_tokens.append(cur_substr)
            start = end
        return sub_tokens

    def tokenize(self, text):
        output = []
        for word in whitespace_tokenize(text.lower()):
            for token in split_on_punctuation(word):
                output.extend(self.wordpiece(token))
        return output

    def encode(self, text):
        return [self.vocab[piece] for piece in self.tokenize(text)]

    def decode(self, ids):
        return " ".join(self.inverse[i] for i in ids).replace(" ##", "").strip()


subject = Subject(
    kind="tokenizer",
    name="WordPiece",
    build=lambda c: WordpieceTokenizer(load_vocab()),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    vocabulary=lambda model: dict(model.vocab),
    declares={"algorithm": "wordpiece", "byte_level": False, "reversible": False, "unknown_id": 1},
)
