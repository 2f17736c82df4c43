"""The reference's tokenizers, trained on a text of invented words."""

from __future__ import annotations

from functools import cache
from typing import Any

from veriformer.properties.adapters.shared.made_text import made_text
from veriformer.properties.subject.subject import Subject
from veriformer.reference.tokenization import BytePairEncoding, Unigram, WordPiece, letters, split_basic, split_words

SPECIAL = "<|end|>"
_PIECES = 400


@cache
def _byte_pairs() -> BytePairEncoding:
    return BytePairEncoding.train([made_text()], _PIECES, [SPECIAL])


@cache
def _word_pieces() -> WordPiece:
    """Return a vocabulary of single letters, of frequent words, and of their ends."""
    words = sorted({word.strip(".,") for word in made_text().split()})
    single = sorted({letter for word in words for letter in word} | {"!", ".", ","})
    pieces = ["[UNK]", *single, *(f"##{letter}" for letter in single), *words[::3], *(f"##{w[1:]}" for w in words[::4])]
    return WordPiece({piece: index for index, piece in enumerate(dict.fromkeys(p for p in pieces if p != "##"))})


@cache
def _unigram() -> Unigram:
    return Unigram.train([made_text(500)], _PIECES)


def build_byte_pairs(config: Any) -> Any:
    """Return the byte-level tokenizer; the drawn sizes do not matter to it."""
    return _byte_pairs()


def build_word_pieces(config: Any) -> Any:
    """Return the WordPiece tokenizer."""
    return _word_pieces()


def build_unigram(config: Any) -> Any:
    """Return the unigram tokenizer."""
    return _unigram()


def encode(model: Any, text: str) -> list[int]:
    """Return the ids of a text."""
    return model.encode(text)


def decode(model: Any, ids: list[int]) -> str:
    """Return the text of ids."""
    return model.decode(ids)


def train(texts: list[str], vocab_size: int) -> Any:
    """Train a byte-level tokenizer."""
    return BytePairEncoding.train(texts, vocab_size)


def byte_words(model: Any, text: str) -> list[list[str]]:
    """Return the words of a text as letters that stand for bytes."""
    return [letters(word) for word in split_words(text)]


def basic_words(model: Any, text: str) -> list[list[str]]:
    """Return the words of a text as characters."""
    return [list(word) for word in split_basic(text)]


def whole_text(model: Any, text: str) -> list[list[str]]:
    """Return the text as one word, its spaces written as the unigram model does."""
    return [list(model.SPACE + text.replace(" ", model.SPACE))] if text else []


def vocabulary(model: Any) -> dict[str, int]:
    """Return piece to id."""
    return model.vocabulary


def merges(model: Any) -> list[tuple[str, str]]:
    """Return the merges in the order learnt."""
    return model.merges


def scores(model: Any) -> dict[str, float]:
    """Return piece to log probability."""
    return model.log_p


SHIPPED = {
    "byte-pairs": Subject(
        kind="tokenizer",
        name="reference byte pair encoding",
        build=build_byte_pairs,
        forward=encode,
        decode=decode,
        train=train,
        words=byte_words,
        vocabulary=vocabulary,
        merges=merges,
        declares={
            "algorithm": "bpe",
            "byte_level": True,
            "reversible": True,
            "specials": {SPECIAL: _PIECES},
        },
    ),
    "wordpiece": Subject(
        kind="tokenizer",
        name="reference WordPiece",
        build=build_word_pieces,
        forward=encode,
        decode=decode,
        words=basic_words,
        vocabulary=vocabulary,
        declares={"algorithm": "wordpiece", "unknown_id": 0, "reversible": False},
    ),
    "unigram": Subject(
        kind="tokenizer",
        name="reference unigram model",
        build=build_unigram,
        forward=encode,
        decode=decode,
        words=whole_text,
        vocabulary=vocabulary,
        scores=scores,
        declares={"algorithm": "unigram", "reversible": False},
    ),
}
