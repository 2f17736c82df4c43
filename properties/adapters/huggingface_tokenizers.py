"""tokenizers: byte pair encoding, WordPiece and the unigram model, trained on a text of invented words."""

from __future__ import annotations

from functools import cache
from typing import Any

from veriformer.properties.adapters.shared.made_text import made_text
from veriformer.properties.subject.subject import Subject

_PIECES = 400
_END = "<|end|>"


@cache
def _byte_pairs() -> Any:
    return train([made_text()], _PIECES)


def train(texts: list[str], vocab_size: int) -> Any:
    """Train a byte-level tokenizer, its special token first."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=[_END], show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made


@cache
def _word_pieces() -> Any:
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=_PIECES, special_tokens=["[UNK]"], show_progress=False)
    made.train_from_iterator([made_text()], trainer)
    return made


def build_byte_pairs(config: Any) -> Any:
    """Return the byte-level tokenizer; the drawn sizes do not matter to it."""
    return _byte_pairs()


def build_word_pieces(config: Any) -> Any:
    """Return the WordPiece tokenizer."""
    return _word_pieces()


def encode(model: Any, text: str) -> list[int]:
    """Return the ids of a text."""
    return list(model.encode(text).ids)


def decode(model: Any, ids: list[int]) -> str:
    """Return the text of ids, special ones too."""
    return str(model.decode(ids, skip_special_tokens=False))


def words(model: Any, text: str) -> list[list[str]]:
    """Return the words that are segmented each for itself, as lists of symbols."""
    return [list(word) for word, _ in model.pre_tokenizer.pre_tokenize_str(text)]


def vocabulary(model: Any) -> dict[str, int]:
    """Return piece to id."""
    return dict(model.get_vocab())


SHIPPED = {
    "byte-pairs": Subject(
        kind="tokenizer", name="tokenizers BPE (byte level)", build=build_byte_pairs, forward=encode, decode=decode,
        train=train, words=words, vocabulary=vocabulary,
        declares={"algorithm": "bpe", "byte_level": True, "reversible": True, "specials": {_END: 0}},
    ),
    "wordpiece": Subject(
        kind="tokenizer", name="tokenizers WordPiece", build=build_word_pieces, forward=encode, words=words,
        vocabulary=vocabulary, declares={"algorithm": "wordpiece", "unknown_id": 0},
    ),
}  # fmt: skip
