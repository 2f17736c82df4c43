from veriformer.properties import Subject

LETTERS = "abcdefghiklmnoprstuvwy"  # no j, q, x, z: what has one of them is unknown
VOCAB = ["[UNK]"]
VOCAB += list(LETTERS)
VOCAB += ["##" + letter for letter in LETTERS if letter not in "kvw"]
VOCAB += ["un", "aff", "the", "play", "token", "trans", "form", "formal", "low", "new"]
VOCAB += ["##able", "##aff", "##ing", "##er", "##est", "##s", "##form", "##former", "##ize", "##iz", "##ation", "##ness"]
VOCAB = list(dict.fromkeys(VOCAB))


class WordpieceTokenizer:
    """Greedy longest match first, after BERT's."""

    def __init__(self, vocab, unk_token="[UNK]"):
        self.vocab = {piece: number for number, piece in enumerate(vocab)}
        self.unk_token = unk_token

    def tokenize(self, text):
        output_tokens = []
        for token in text.split():
            is_bad = False
            start = 0
            sub_tokens = []
            while start < len(token):
                end = len(token)
                cur_substr = None
                while start < end:
                    substr = token[start:end]
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
                output_tokens.append(self.unk_token)
            else:
                output_tokens.extend(sub_tokens)
        return output_tokens

    def encode(self, text):
        return [self.vocab[token] for token in self.tokenize(text)]


subject = Subject(
    kind="tokenizer",
    build=lambda c: WordpieceTokenizer(VOCAB),
    forward=lambda model, text: model.encode(text),
    words=lambda model, text: [list(word) for word in text.split()],
    vocabulary=lambda model: dict(model.vocab),
    declares={"algorithm": "wordpiece", "unknown_id": 0, "byte_level": False, "reversible": False},
)
