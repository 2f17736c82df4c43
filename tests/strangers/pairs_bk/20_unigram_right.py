import math

from veriformer.properties import Subject

COUNTS = {
    "\u2581": 400, "\u2581the": 300, "\u2581a": 150, "\u2581of": 120, "\u2581to": 90, "\u2581trans": 25, "\u2581token": 30,
    "\u2581model": 28, "\u2581re": 40, "\u2581un": 35, "former": 12, "form": 31, "ing": 80, "ed": 75, "er": 70, "ation": 26,
    "ization": 14, "iz": 9, "ly": 33, "s": 210, "es": 60, "th": 55, "he": 52, "in": 66, "on": 64, "an": 61, "able": 21,
    "\u2581transform": 11, "\u2581attention": 24, "\u2581transformation": 17, "\u2581representation": 19, "sentence": 8,
}
for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz"):
    COUNTS.setdefault(letter, 20 + (index * 7) % 23)


class Unigram:
    def __init__(self, counts):
        total = sum(counts.values())
        self.logp = {piece: math.log(n / total) for piece, n in counts.items()}
        self.vocab = {"<unk>": 0} | {piece: i for i, piece in enumerate(self.logp, start=1)}
        self.pieces = {i: piece for piece, i in self.vocab.items()}
        self.longest = max(len(piece) for piece in self.logp)
        self.unk_logp = min(self.logp.values()) - 10.0

    @staticmethod
    def words(text):
        return ["\u2581" + word for word in text.split()]

    def viterbi(self, word):
        best = [0.0] + [-math.inf] * len(word)
        back = [0] * (len(word) + 1)
        for end in range(1, len(word) + 1):
            for start in range(max(0, end - self.longest), end):
                piece = word[start:end]
                score = self.logp.get(piece)
                if score is None:
                    if end - start > 1:
                        continue
                    score = self.unk_logp
                if best[start] + score > best[end]:
                    best[end], back[end] = best[start] + score, start
        cut, end = [], len(word)
        while end > 0:
            cut.append(word[back[end] : end])
            end = back[end]
        return cut[::-1]

    def encode(self, text):
        return [self.vocab.get(piece, 0) for word in self.words(text) for piece in self.viterbi(word)]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids).replace("\u2581", " ").strip()


subject = Subject(
    kind="tokenizer",
    build=lambda c: Unigram(COUNTS),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    words=lambda model, text: [list(word) for word in model.words(text)],
    vocabulary=lambda model: dict(model.vocab),
    scores=lambda model: dict(model.logp),
    declares={"algorithm": "unigram", "unknown_id": 0, "byte_level": False, "reversible": False},
)
