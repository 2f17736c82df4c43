"""BERT's WordPiece: greedy, longest piece first, a word that cannot be covered is one [UNK]."""
import string

from veriformer.properties import Subject

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES += list(string.ascii_lowercase) + ["##" + letter for letter in string.ascii_lowercase if letter not in "jqxz"]
PIECES += ["the", "play", "##ing", "##ed", "un", "##able", "##er", "in", "##st", "or", "an", "##es", "wor", "##ld", "he", "##ll", "hell"]
VOCAB = {piece: i for i, piece in enumerate(PIECES)}


class WordpieceTokenizer:
    def __init__(self, vocab, unk_token="[UNK]", max_input_chars_per_word=100):
        self.vocab = vocab
        self.unk_token = unk_token
        self.max_input_chars_per_word = max_input_chars_per_word

    def tokenize(self, text):
        output_tokens = []
        for token in text.split():
            chars = list(token)
            if len(chars) > self.max_input_chars_per_word:
                output_tokens.append(self.unk_token)
                continue
            is_bad = False
            start = 0
            sub_tokens = []
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
                    is_bad = True
                    break
                sub_tokens.append(cur_substr)
                start = end
            if is_bad:
                sub_tokens = [self.unk_token]
            output_tokens.extend(sub_tokens)
        return output_tokens

    def encode(self, text):
        return [self.vocab[piece] for piece in self.tokenize(text)]


def words(model, text):
    return [[c if i == 0 else "##" + c for i, c in enumerate(word)] for word in text.split()]


subject = Subject(
    kind="tokenizer",
    name="WordPiece",
    build=lambda c: WordpieceTokenizer(VOCAB),
    forward=lambda m, text: m.encode(text),
    vocabulary=lambda m: m.vocab,
    words=words,
    declares={"algorithm": "wordpiece", "unknown_id": VOCAB["[UNK]"], "byte_level": False, "reversible": False},
)
