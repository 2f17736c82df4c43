"""sentencepiece: the unigram model and byte pair encoding, trained on a text of invented words."""

from __future__ import annotations

import io
from functools import cache, partial
from typing import Any

from veriformer.properties.adapters.shared.made_text import made_text
from veriformer.properties.subject.subject import Subject


@cache
def _trained(algorithm: str, byte_fallback: bool) -> Any:
    import sentencepiece

    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(made_text(2000).split(".")),
        model_writer=buffer,
        vocab_size=400 if byte_fallback else 120,
        model_type=algorithm,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        hard_vocab_limit=False,
        remove_extra_whitespaces=False,
        byte_fallback=byte_fallback,
        minloglevel=2,
        num_threads=1,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=buffer.getvalue())


def build(config: Any, algorithm: str, byte_fallback: bool) -> Any:
    """Return a trained model; the drawn sizes do not matter to it."""
    return _trained(algorithm, byte_fallback)


def encode(model: Any, text: str) -> list[int]:
    """Return the ids of a text."""
    return list(model.encode(text))


def decode(model: Any, ids: list[int]) -> str:
    """Return the text of ids."""
    return str(model.decode(ids))


def whole_text(model: Any, text: str) -> list[list[str]]:
    """Return the text as one word, its spaces written as the model does."""
    return [list(text.replace(" ", "▁"))] if text else []


def vocabulary(model: Any) -> dict[str, int]:
    """Return piece to id."""
    return {model.id_to_piece(i): i for i in range(model.get_piece_size())}


def scores(model: Any) -> dict[str, float]:
    """Return piece to log probability, of the pieces that segment text."""
    kept = [
        i for i in range(model.get_piece_size()) if not (model.is_control(i) or model.is_unknown(i) or model.is_byte(i))
    ]
    return {model.id_to_piece(i): model.get_score(i) for i in kept}


SHIPPED = {
    "unigram": Subject(
        kind="tokenizer",
        name="sentencepiece unigram",
        build=partial(build, algorithm="unigram", byte_fallback=False),
        forward=encode,
        decode=decode,
        words=whole_text,
        vocabulary=vocabulary,
        scores=scores,
        declares={"algorithm": "unigram", "reversible": False},  # without bytes, what its text lacks is unknown
    ),
    "bpe-bytes": Subject(
        kind="tokenizer",
        name="sentencepiece BPE (byte fallback)",
        build=partial(build, algorithm="bpe", byte_fallback=True),
        forward=encode,
        decode=decode,
        declares={"algorithm": "other", "reversible": True},
    ),
}
