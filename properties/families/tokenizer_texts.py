"""Why a text does not come back from its ids; part of `tokenizer.round-trip`."""

from __future__ import annotations

from collections import Counter

import torch

from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.engine.case import Case
from veriformer.properties.families.tokenizer_training import encoded

_PIECES = {
    "a blank between words": "a b", "two blanks between words": "a  b", "a blank at the beginning": " a",
    "a blank at the end": "a ", "blanks alone": "  ", "a tab between words": "a\tb", "a newline between words": "a\nb",
    "a newline at the end": "a\n", "a newline at the beginning": "\na", "a carriage return": "a\r\nb",
    "capitals": "AbC",
    "digits": "123", "punctuation": "a,(b)!", "underscores": "a_b", "an apostrophe": "don't",
    "accented letters (U+00E9)": "\u00e9", "combining accents (e, U+0301)": "e\u0301", "ligatures (U+FB01)": "\ufb01",
    "full-width letters": "\uff21", "Greek and Cyrillic": "\u03b1\u0436", "Chinese": "\u6771\u4eac",
    "emoji": "\U0001f600", "joined emoji": "\U0001f469\u200d\U0001f52c", "zero-width characters": "a\u200bb",
    "no-break spaces": "a\u00a0b", "control characters": "a\x00\x1fb",
    "noncharacters and private use": "\ue000\U0010ffff",
}  # fmt: skip
"""What tokenizers are known to lose, each by itself."""


def kept_words(case: Case, text: str) -> str | None:
    """Tell whether a new tokenizer gives a text back, so that what an earlier call left is to blame."""
    if case.subject.build is None:
        return None
    first_is_right = False
    with off_the_record(case):
        for one in (text, "ab cd", "a b"):
            new = case.bench.pool.fresh(case.config(), torch.float32)
            runs = [str(case.ask("decode", encoded(case, new, one), built=new)) for _ in range(2)]
            if runs[0] == one != runs[1]:
                return (
                    f"a new tokenizer is right for {one[:40]!r} the first time, and not when it is given that again: "
                    "what it keeps of a word (a cache) is changed after it was stored"
                )
            first_is_right = first_is_right or (one == text == runs[0])
    told = "a new tokenizer gives the text back: what this one keeps of texts that it was given before is to blame"
    return told if first_is_right else None


def words_without_blank(case: Case) -> str | None:
    """Say that a word is lost behind its like without a blank, where each is right on a new tokenizer."""
    if case.subject.build is None:
        return None
    wrong = []
    with off_the_record(case):
        for text in ("low", " low", "low low"):
            new = case.bench.pool.fresh(case.config(), torch.float32)
            if str(case.ask("decode", encoded(case, new, text), built=new)) != text:
                wrong.append(text)
    if wrong != ["low low"]:
        return None
    return (
        "'low' and ' low' come back by themselves, and 'low low' does not: what is kept of a word (a cache) is found "
        "by the word without the blank before it"
    )


def decoded_one_by_one(case: Case, built: Built, text: str, got: str) -> str | None:
    """Tell whether the text is what each id gives by itself, where characters lie in the bytes of several."""
    if "\ufffd" not in got or "\ufffd" in text:
        return None
    with off_the_record(case):
        ids = encoded(case, built, text)
        alone = [str(case.ask("decode", [one], built=built)) for one in ids]
    if len(ids) < 2 or "".join(alone) != got:
        return None
    return (
        "the text is that of each id decoded by itself: the bytes of a character that lie in several tokens are to be "
        "joined before they are decoded as UTF-8"
    )


def lost_characters(case: Case, built: Built, text: str, got: str) -> str | None:
    """Try what is known to be lost, one after another; and say what is missing here."""
    missing, added = Counter(text) - Counter(got), Counter(got) - Counter(text)
    shown = [", ".join(f"U+{ord(c):04X}" for c in list(found)[:4]) for found in (missing, added)]
    replaced = ", replaced by U+FFFD" if "\ufffd" in got and "\ufffd" not in text else ""
    told = f"missing: {shown[0]}{replaced}" if missing else f"added: {shown[1]}" if added else "characters were moved"
    with off_the_record(case):
        back = {
            words: str(case.ask("decode", encoded(case, built, piece), built=built)) for words, piece in _PIECES.items()
        }
    lost = [words for words, piece in _PIECES.items() if back[words] != piece]
    kept = [words for words in _PIECES if words not in lost]
    if not lost or len(lost) > 20:
        return told
    example = next((words for words in lost if set(_PIECES[words]) & set(missing)), lost[0])
    near = [words for words in kept if set(_PIECES[words]) & set(_PIECES[example]) - set("ab")]
    besides = f"; {', '.join(near[:3])} come back" if near else ""
    return (
        f"{told}; of short texts, those with {', '.join(lost[:6])} come back otherwise ({_PIECES[example]!r} as "
        f"{back[example]!r}){besides}"
    )
