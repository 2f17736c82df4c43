"""A text to train tokenizers on: invented words with the frequencies of a language, so that nobody's text is needed."""

from __future__ import annotations

import random

_STARTS = ("b", "br", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v")
_MIDDLES = ("a", "e", "i", "o", "u", "ai", "ea", "é")
_ENDS = ("", "", "n", "r", "s", "l", "nd")


def made_text(words: int = 2000, seed: int = 0) -> str:
    """Return sentences of invented words, the k-th most frequent about 1/k as frequent as the first (Zipf).

    Args:
        words: number of words.
        seed: the same seed gives the same text.
    """
    choose = random.Random(seed)
    lexicon = list(dict.fromkeys(_word(choose) for _ in range(400)))
    drawn = choose.choices(lexicon, [1 / (rank + 1) for rank in range(len(lexicon))], k=words)
    text: list[str] = []
    for number, word in enumerate(drawn):
        ends = number % 11 == 10
        text.append(
            (word.capitalize() if number % 11 == 0 else word) + ("." if ends else "," if number % 7 == 5 else "")
        )
        if number % 29 == 28:
            text.append(str(choose.randint(1, 2999)))
    return " ".join(text)


def _word(choose: random.Random) -> str:
    syllables = choose.choices((1, 2, 3), (5, 4, 1))[0]
    return "".join(choose.choice(_STARTS) + choose.choice(_MIDDLES) + choose.choice(_ENDS) for _ in range(syllables))
