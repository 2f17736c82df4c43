"""A unigram tokenizer (SentencePiece style) with a small fixed vocabulary and Viterbi's algorithm."""

import math

from veriformer.properties import Subject

WHAT = "Viterbi never tries pieces of the greatest length, since the inner loop starts one character too late."
CAUSE = (
    "The start of a piece that ends at `end` runs from end - longest + 1 instead of end - longest, so the longest pieces "
    "of the vocabulary (four letters here) are no candidates, and words that hold one get a less probable segmentation."
)

SPACE, UNKNOWN = "▁", "<unk>"
COUNTS = {
    "tion": 900, "ment": 700, "ness": 500, "ther": 650, "▁the": 2000, "▁and": 1500, "▁for": 800, "ight": 300,
    "ing": 1600, "ent": 420, "ion": 380, "est": 350, "▁to": 900, "▁of": 950, "▁in": 850, "ers": 260, "ous": 240,
    "th": 500, "he": 480, "in": 460, "er": 450, "an": 430, "re": 400, "on": 390, "at": 370, "en": 360, "nd": 330,
    "ti": 320, "es": 310, "or": 300, "te": 290, "of": 120, "ed": 280, "is": 270, "it": 265, "▁a": 700, "▁t": 200,
}  # fmt: skip
LETTERS = {letter: 60 + 5 * i for i, letter in enumerate("zqxjkvbpygfwmucldrhsnioate" + SPACE)}


class Unigram:
    def __init__(self, counts):
        total = sum(counts.values())
        self.score = {piece: math.log(count / total) for piece, count in counts.items()}
        self.ids = {UNKNOWN: 0} | {piece: i for i, piece in enumerate(sorted(counts), start=1)}
        self.longest = max(map(len, counts))
        self.penalty = min(self.score.values()) - 10

    def words(self, text):
        """Every space begins a new word, and is its first symbol."""
        words, word = [], []
        for letter in text.replace(" ", SPACE):
            if letter == SPACE and word:
                words.append(word)
                word = []
            word.append(letter)
        return words + [word] if word else words

    def starts(self, end):
        return range(max(0, end - self.longest), end)

    def segment(self, word):
        """The most probable pieces of one word; a letter that is not known is a piece of its own."""
        word = "".join(word)
        best = [(0.0, 0)] + [(-math.inf, 0)] * len(word)
        for end in range(1, len(word) + 1):
            for start in self.starts(end):
                piece = word[start:end]
                score = self.score.get(piece, self.penalty if end - start == 1 else -math.inf)
                best[end] = max(best[end], (best[start][0] + score, start))
        pieces, end = [], len(word)
        while end:
            start = best[end][1]
            pieces.append(word[start:end])
            end = start
        return pieces[::-1]

    def encode(self, text):
        return [self.ids.get(piece, 0) for word in self.words(text) for piece in self.segment(word)]


class UnigramShort(Unigram):
    def starts(self, end):
        return range(max(0, end - self.longest + 1), end)


def subject(cls):
    return Subject(
        kind="tokenizer",
        name=cls.__name__,
        build=lambda c: cls(COUNTS | LETTERS),
        forward=lambda m, text: m.encode(text),
        words=lambda m, text: m.words(text),
        vocabulary=lambda m: dict(m.ids),
        scores=lambda m: dict(m.score),
        declares={"algorithm": "unigram", "unknown_id": 0},
    )


right = subject(Unigram)
wrong = subject(UnigramShort)
