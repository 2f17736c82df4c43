"""tiktoken: an encoding made from the reference's merges, so that nothing is downloaded."""

from __future__ import annotations

from functools import cache
from typing import Any

from veriformer.properties.adapters.shared.made_text import made_text
from veriformer.properties.subject.subject import Subject
from veriformer.reference.tokenization import BYTE_OF, BytePairEncoding

_PIECES = 400
_END = "<|end|>"


@cache
def _encoding() -> Any:
    import tiktoken

    trained = BytePairEncoding.train([made_text()], _PIECES)
    ranks = {bytes(BYTE_OF[letter] for letter in piece): index for piece, index in trained.vocabulary.items()}
    return tiktoken.Encoding(
        "made", pat_str=r" ?\S+|\s+(?!\S)|\s+", mergeable_ranks=ranks, special_tokens={_END: _PIECES}
    )


def build(config: Any) -> Any:
    """Return the encoding; the drawn sizes do not matter to it."""
    return _encoding()


def encode(model: Any, text: str) -> list[int]:
    """Return the ids of a text, special tokens among them."""
    return list(model.encode(text, allowed_special="all"))


def decode(model: Any, ids: list[int]) -> str:
    """Return the text of ids."""
    return str(model.decode(ids))


SHIPPED = {
    "byte-pairs": Subject(
        kind="tokenizer", name="tiktoken Encoding", build=build, forward=encode, decode=decode,
        declares={"algorithm": "bpe", "byte_level": True, "reversible": True, "specials": {_END: _PIECES}},
    ),
}  # fmt: skip
