"""Tokenizers: nothing is lost, nothing depends on the call, and the pieces are those of the algorithm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.segmentation import (
    as_dict,
    as_pairs,
    differ,
    is_without,
    listed,
    longest_pieces,
    merged_ids,
    probabilities,
    times_more,
)
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_fact, needs_part
from veriformer.properties.engine.property import holds
from veriformer.properties.families.tokenizer_texts import (
    decoded_one_by_one,
    kept_words,
    lost_characters,
    words_without_blank,
)
from veriformer.properties.families.tokenizer_training import encoded, training_merges_the_most_frequent
from veriformer.properties.formulas.tokenizing.merging import merges_cause
from veriformer.properties.formulas.tokenizing.pieces import pieces_cause
from veriformer.properties.formulas.tokenizing.word_pieces import cut_cause

_KIND = ("tokenizer",)
_FEW_LETTERS = "abc "
"""So that pairs repeat and pieces overlap."""

LONGEST = 12
"""Letters of a text whose segmentations are all tried: at most 2^11 of them."""

SAMPLES = (
    "plain words, 123 and (signs)",
    "snake_case __init__ x_1",
    "".join(map(chr, range(32, 127))),
    "  leading, trailing  ",
    "tab\tnewline\nreturn\r\n",
    "naïve Ångström ß ½",
    "e\u0301 is not é",
    "東京 한국어 עברית العربية हिन्दी ไทย",
    "\U0001f469\u200d\U0001f52c\U0001f3fd \U0001f1e8\U0001f1ed",  # joined, coloured, and a flag
    "\u200b\u200d\ufeff\u00a0",
    "\x00\x1f\x7f",
    "\U0010ffff\ue000\ufffd",
    "a" * 60,
    "'s 're don't",
    "\u2581 already there",
    "<0xEA> ##ing [UNK] </s>",
)
"""Texts of every kind that tokenizers have lost something of."""


def _built(case: Case) -> Built:
    return case.built(dtype=torch.float32)


def _text(case: Case) -> str:
    """Draw a text: any characters of Unicode, or one of the samples, or both."""
    sample = case.choice("sample", ("", *SAMPLES))
    return str(sample) + case.text("text")


@holds(
    "tokenizer.round-trip",
    statement="Decoding the ids of a text gives back the text, to the letter.",
    formula="decode(encode(s)) = s for every s of Unicode",
    source="Radford et al. 2019, 2.2; documented bugs TK01, TK04.",
    kinds=_KIND,
    unless=(needs_part("decode"), excludes_fact("reversible", False)),
    examples_factor=4,
    asks=("reversible", False),
    catches=("TK01", "TK04"),
)
def decoding_gives_back_the_text(case: Case) -> None:
    """For tokenizers that declare themselves reversible; others normalise, and must only repeat themselves. Halves of
    surrogate pairs are no text.
    """
    built, text = _built(case), _text(case)
    got = case.ask("decode", encoded(case, built, text), built=built)
    case.equal(
        got, text, "decoding the ids gives another text",
        cause=lambda: (
            kept_words(case, text)
            or decoded_one_by_one(case, built, text, str(got))
            or lost_characters(case, built, text, str(got))
        ),
    )  # fmt: skip
    twice = f"{text} {text}"
    got = case.ask("decode", encoded(case, built, twice), built=built)
    case.equal(got, twice, "decoding the ids of a text that is said twice gives another text",
               cause=lambda: words_without_blank(case) or lost_characters(case, built, twice, str(got)))  # fmt: skip
    case.witness()


@holds(
    "tokenizer.deterministic",
    statement="The same text gives the same ids, whatever was encoded between; other texts, other ids.",
    formula="encode(s) = encode(s) after encode(t); s != t => encode(s) != encode(t) where reversible",
    source="Definition of a function.",
    kinds=_KIND,
    examples_factor=2,
)
def the_same_text_gives_the_same_ids(case: Case) -> None:
    """Caches of words and sampled segmentations (BPE dropout, unigram sampling) left on are what breaks it."""
    built, text, other = _built(case), _text(case), case.text("other")
    first = encoded(case, built, text)
    between = encoded(case, built, other)
    again = encoded(case, built, text)
    case.equal(again, first, "the same text gives other ids the second time")
    if text != other and case.subject.fact("reversible"):
        case.require(
            case.apply(differ, first, between), "two texts have the same ids", got=f"{text!r} and {other!r}"[:120]
        )
    case.witness()


@holds(
    "tokenizer.no-unknown",
    statement="A byte-level tokenizer knows every text: no unknown token, and no character without a token.",
    formula="byte level: unk not in encode(s), and encode(s) is empty only for the empty text",
    source="Radford et al. 2019, 2.2; documented bug TK01.",
    kinds=_KIND,
    level="extended",
    unless=needs_fact("byte_level", True),
    examples_factor=2,
    catches=("TK01",),
)
def bytes_are_never_unknown(case: Case) -> None:
    """Every character of the drawn text is tried by itself too, so that one that is dropped does not hide."""
    built, text = _built(case), _text(case)
    unknown = case.subject.fact("unknown_id")
    for part in (text, *dict.fromkeys(text)):
        ids = encoded(case, built, part)
        case.require(case.apply(is_without, ids, unknown), "a text has an unknown token", got=repr(part)[:80])
        case.require(case.apply(differ, ids, []) if part else True, "a text has no token at all", got=repr(part)[:80])
    case.witness()


@holds(
    "tokenizer.specials",
    statement="A special token in a text is one token, its own; no other text gives it.",
    formula="encode(a + special + b) contains id(special) once; encode(a) does not",
    source="documented behaviour of every library; prompt injection rests on its absence.",
    kinds=_KIND,
    level="extended",
    unless=needs_fact("specials"),
)
def special_tokens_are_never_cut(case: Case) -> None:
    """Compares with the same text without it, since many tokenizers add special tokens at the ends of any text."""
    built = _built(case)
    specials: Mapping[str, int] = case.subject.fact("specials")
    special = case.choice("special", tuple(specials))
    before, after = case.text("before", "ab ", 6), case.text("after", "ab ", 6)
    without = encoded(case, built, before + after)
    having = encoded(case, built, before + special + after)
    wanted = specials[special]
    more = case.apply(times_more, wanted, having, without)
    case.equal(
        more,
        1,
        f"the special token {special!r} does not become its own id",
        got=f"id {wanted} {more} times more than without it",
        expected="once more",
        cause=lambda: _cut_by_another(having, without, special, specials),
    )
    almost = special[:-1]
    cut = encoded(case, built, before + almost + after)
    case.equal(
        0 if almost in specials else case.apply(times_more, wanted, cut, without),
        0,
        f"{almost!r} gives the id of the special token {special!r}",
        got=f"id {wanted}",
    )
    case.witness()


def _cut_by_another(having: list[int], without: list[int], special: str, specials: Mapping[str, int]) -> str | None:
    """Say which shorter special tokens stand in the place of a longer one."""
    more = Counter(having) - Counter(without)
    inside = {text: more[number] for text, number in specials.items() if text != special and text in special}
    found = {text: times for text, times in inside.items() if times}
    if not found:
        return None
    listed_ones = ", ".join(f"{text!r} {times} times" for text, times in found.items())
    return (
        f"{special!r} is cut into other special tokens ({listed_ones}): where one begins with another the longer "
        "must be tried first"
    )


def _segments(case: Case, built: Built, text: str) -> list[list[str]]:
    """Return the words of a text as lists of symbols."""
    return case.apply(listed, case.ask("words", text, built=built))


def _pieces(case: Case, built: Built) -> tuple[dict[int, str], dict[str, int]]:
    vocabulary = case.apply(as_dict, case.ask("vocabulary", built=built))
    return {index: piece for piece, index in vocabulary.items()}, vocabulary


@holds(
    "tokenizer.bpe-merges",
    statement="Training merges the most frequent pair each time; encoding applies the merges in the order learnt.",
    formula="merge_k = argmax count of pairs after merges 1..k-1; encode = apply merges by rank, word by word",
    source="Sennrich et al. 2016, algorithm 1; documented bugs TK02, TK05.",
    kinds=_KIND,
    level="extended",
    unless=(needs_fact("algorithm", "bpe"), needs_part("words"), needs_part("merges"), needs_part("vocabulary")),
    catches=("TK02", "TK05"),
)
def merges_are_learnt_and_applied_in_order(case: Case) -> None:
    """Against a recount after every merge, and a segmentation that tries the merges one after another: a round trip
    alone is blind to both. Of equally frequent pairs any may be chosen. Where the subject does not offer `train`,
    encoding alone is judged.
    """
    built = _built(case)
    _, vocabulary = _pieces(case, built)
    merges = case.apply(as_pairs, case.ask("merges", built=built))
    plain = [joined for pair in merges if (joined := "".join(pair)).isascii() and joined.isalpha()]
    overlaps = [x + y + z for x, y in merges for other, z in merges if other == y]  # which of two comes first matters
    rivals = [word for word in overlaps if word.isascii() and word.isalpha()]
    parts = [case.choice("part", plain or ["ab"]) for _ in range(case.integer("parts", 1, 4))]
    parts += [case.choice("rivals", rivals or ["ab"])]
    text = "".join(parts) + case.text("text", _FEW_LETTERS, 10)
    unknown = case.subject.fact("unknown_id", -1)
    expected = case.apply(merged_ids, _segments(case, built, text), merges, vocabulary, unknown)
    case.equal(
        encoded(case, built, text), expected, f"the ids are not those of the merges in order for {text!r}"[:150],
        cause=lambda: merges_cause(
            lambda t: encoded(case, built, t), lambda t: _segments(case, built, t), vocabulary, merges, unknown
        ),
    )  # fmt: skip
    training_merges_the_most_frequent(case)
    case.witness()


@holds(
    "tokenizer.wordpiece",
    statement="Every word is cut greedily: the longest piece that fits, again and again, or it is unknown.",
    formula="piece_1 = longest prefix in V; piece_k = longest '##' + prefix of the rest; else [UNK] for the word",
    source="Wu et al. 2016, 4.1; Devlin et al. 2019.",
    kinds=_KIND,
    level="extended",
    unless=(
        needs_fact("algorithm", "wordpiece"),
        needs_fact("unknown_id"),
        needs_part("vocabulary"),
    ),
)
def the_longest_piece_is_taken(case: Case) -> None:
    """Texts are put together of the subject's own pieces, so that long matches and dead ends both occur. Where the
    subject does not say what its words are, they are of small letters, with a blank between.
    """
    built = _built(case)
    _, vocabulary = _pieces(case, built)
    offers = case.subject.words is not None
    known = [p for p in sorted(vocabulary) if offers or (p.isascii() and p == p.lower())]
    plain = [piece for piece in known if piece.isalpha()]
    inner = [piece[2:] for piece in known if piece.startswith("##") and piece[2:].isalpha()]
    if not plain:
        case.does_not_apply("no piece of its vocabulary is a word of letters")
    words = []
    for number in range(case.integer("words", 1, 3)):
        start = case.choice(f"start {number}", plain[:: max(1, len(plain) // 60)])
        rest = [case.choice(f"rest {number}", ("", *inner[:: max(1, len(inner) // 60)])) for _ in range(2)]
        words.append(start + "".join(rest) + case.choice(f"dead end {number}", ("", "", "qqzzq")))
    text = " ".join(words) + case.choice("odd", ("", " qqqzzz", "!" if offers else ""))
    unknown = int(case.subject.fact("unknown_id"))
    cut = _segments(case, built, text) if offers else [list(word) for word in text.split(" ")]
    got, expected = encoded(case, built, text), case.apply(longest_pieces, cut, vocabulary, unknown)
    case.equal(
        got, expected, f"the ids are not those of the longest pieces for {text!r}"[:150],
        cause=lambda: _cut_otherwise(case, built, text, vocabulary, unknown),
    )  # fmt: skip
    case.witness()


def _cut_otherwise(case: Case, built: Built, text: str, vocabulary: Mapping[str, int], unknown: int) -> str | None:
    offers = case.subject.words is not None
    with off_the_record(case):
        return cut_cause(
            lambda text: encoded(case, built, text),
            lambda text: _segments(case, built, text) if offers else [list(word) for word in text.split(" ")],
            vocabulary,
            unknown,
            first=text,
            is_plain=lambda piece: piece.isalpha() and (offers or (piece.isascii() and piece == piece.lower())),
        )


@holds(
    "tokenizer.unigram",
    statement="No segmentation of a word is more probable than the one returned.",
    formula="sum_i log p(piece_i) = max over all segmentations",
    source="Kudo 2018, equation 4.",
    kinds=_KIND,
    level="extended",
    unless=(needs_fact("algorithm", "unigram"), needs_part("vocabulary"), needs_part("scores")),
)
def the_most_probable_segmentation_is_returned(case: Case) -> None:
    """By enumeration of all ways to cut short words; of equally probable ones any may be returned. Where `words` is not
    given, the pieces of a word of letters, joined, are the word that was cut.
    """
    built = _built(case)
    names, vocabulary = _pieces(case, built)
    scores = case.apply(as_dict, case.ask("scores", built=built))
    known = sorted((piece for piece in scores if piece.isalpha()), key=lambda piece: (len(piece), piece))
    starts = sorted((p[1:] for p in scores if not p[:1].isalpha() and p[1:].isalpha()), key=len)  # behind a mark
    ends = [known[-1], *starts[-1:], *([_longest_text(scores)] if case.subject.words is not None else [])]
    longest = case.choice("longest", ("", *ends))  # what a limit one too small leaves out
    parts = [longest] if longest else [case.choice("part", known) for _ in range(case.integer("parts", 1, 4))]
    text = "".join(parts)[: 2 * LONGEST if longest else LONGEST]
    ids = encoded(case, built, text)
    if case.subject.words is None and not all(number in names for number in ids):
        case.reject("a piece of it is unknown")
    words = case.apply(joined, ids, vocabulary) if case.subject.words is None else _segments(case, built, text)
    got, best = case.apply(probabilities, ids, words, vocabulary, scores)
    case.require(
        got >= best - 1e-5 * best.abs().clamp(min=1.0),
        f"a more probable segmentation of {text!r} exists",
        got=f"{[names.get(i, '?') for i in ids]}, log probability {got:.6g}"[:150],
        expected=f"{best:.6g}",
        cause=lambda: _cut_by(case, built, vocabulary, scores),
    )
    case.witness()


def _longest_text(scores: Mapping[str, float]) -> str:
    """Return the longest piece of letters, digits and blanks as the text that it stands for."""
    texts = [piece.replace("\u2581", " ") for piece in scores]
    plain = [text for text in texts if all(c.isalnum() or c == " " for c in text)]
    return max(plain, key=lambda text: (len(text), text), default="")


def _cut_by(case: Case, built: Built, vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> str | None:
    own = case.subject.words is not None
    with off_the_record(case):
        return pieces_cause(
            lambda text: encoded(case, built, text),
            lambda text: _segments(case, built, text) if own else joined(encoded(case, built, text), vocabulary),
            vocabulary,
            scores,
        )


def joined(ids: Sequence[int], vocabulary: Mapping[str, int]) -> list[list[str]]:
    """Return the one word that ids are the pieces of, as a list of symbols."""
    names = {index: piece for piece, index in vocabulary.items()}
    return [list("".join(names.get(index, "?") for index in ids))]
