"""A claim: a statement of the course notes, where it stands, and the function that gathers the evidence for it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veriformer.claims.evidence import Evidence

SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "A": "Transformers, course notes on theory",
        "B": "What a Transformer is, notes on architecture",
        "C": "Lecture 08: Transformers",
        "D": "Transformer architecture, a summary",
        "E": "Chapter 10: Transformer Models",
    }
)
"""The notes by the letter under which a claim cites them."""

TOPICS = (
    "positions",
    "attention",
    "masks",
    "feed-forward",
    "norms",
    "residual",
    "training",
    "size",
    "cost",
    "tokens",
    "pooling",
    "architectures",
)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement.

    Attributes:
        number: of its row in the ledger.
        statement: in our words.
        sources: letter of `SOURCES` and section, as "A 3.2".
        topic: one of `TOPICS`.
        derivation: why it is so, or why it is not.
        gather: gives its findings to an `Evidence`.
        formula: in TeX.
        condition: under which it holds, where it does not hold as written.
        corrected: what is true in its place.
        cites: where the derivation or the correction comes from, beyond the notes.
        reason: why nothing here can test it.
        trains: whether models are trained for it.
    """

    number: int
    statement: str
    sources: tuple[str, ...]
    topic: str
    derivation: str
    gather: Callable[[Evidence], None]
    formula: str = ""
    condition: str = ""
    corrected: str = ""
    cites: str = ""
    reason: str = ""
    trains: bool = False

    def __post_init__(self) -> None:
        if self.topic not in TOPICS:
            raise ValueError(f"claim {self.number} is about {self.topic!r}; it must be one of {', '.join(TOPICS)}")
        for source in self.sources:
            if source.partition(" ")[0] not in SOURCES:
                raise ValueError(
                    f"claim {self.number} cites {source!r}; it must begin with one of {', '.join(SOURCES)}"
                )
        if self.condition and self.corrected:
            raise ValueError(f"claim {self.number} has a condition and a correction; give the one that is tested")


_CLAIMS: dict[int, Claim] = {}


def claim(
    number: int, statement: str, *sources: str, topic: str, derivation: str, **fields: Any
) -> Callable[[Callable[[Evidence], None]], Callable[[Evidence], None]]:
    """Put a statement into the ledger; the decorated function gathers its evidence.

    Raises:
        ValueError: the number is taken, or a field is not one of the known.
    """

    def put(gather: Callable[[Evidence], None]) -> Callable[[Evidence], None]:
        if number in _CLAIMS:
            raise ValueError(f"there is a claim {number} already; give the new one another number")
        _CLAIMS[number] = Claim(
            number=number,
            statement=statement,
            sources=sources,
            topic=topic,
            derivation=derivation,
            gather=gather,
            **fields,
        )
        return gather

    return put


def ledger() -> Mapping[int, Claim]:
    """Return every claim by its number, in order."""
    from veriformer.claims import entries

    for module in pkgutil.iter_modules(entries.__path__, f"{entries.__name__}."):
        importlib.import_module(module.name)
    return MappingProxyType(dict(sorted(_CLAIMS.items())))
