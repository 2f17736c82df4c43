"""The exercises and suggested modifications of the theory notes, each answered by claims of the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        name: as the notes have it.
        question: that it asks.
        claims: numbers of the claims that answer it.
    """

    name: str
    question: str
    claims: tuple[int, ...]


EXERCISES = (
    Exercise("Exercise 1", "Sinusoidal positions replaced by learned ones: what happens to the accuracy?", (8,)),
    Exercise("Exercise 2", "Pre-LN instead of post-LN: is training more stable?", (22, 23)),
    Exercise("Exercise 3", "N in {2, 6}, d in {64, 128}: does depth or width serve better?", (31, 32)),
    Exercise("Exercise 4", "What do the attention weights of each layer look like?", (33,)),
    Exercise("Remove positional encoding", "Does the accuracy drop?", (27, 10)),
    Exercise("Remove residual connections", "Does training collapse for N > 2?", (25,)),
    Exercise("Remove LayerNorm", "Does training become unstable, does the loss spike?", (26,)),
    Exercise("d_ff from 4d to 8d", "Is the gain marginal and the memory higher?", (28,)),
    Exercise("ReLU to GELU", "Is there a small gain?", (29,)),
    Exercise("Profile with T of 50 to 800", "Is the growth with T^2 unmistakable?", (40, 39)),
    Exercise("Label smoothing 0.1", "Does it prevent overconfidence?", (30,)),
    Exercise("Train for 50 epochs, watch the entropy", "Do heads focus, do some go dormant?", (33,)),
)


def answer(row: Mapping[str, Any]) -> str:
    """Return one sentence that follows from a row's verdict."""
    if row["verdict"] == "holds":
        return f"Yes: {row['statement']}"
    if row["verdict"] == "holds if":
        return f"Only if {row['condition']}."
    if row["verdict"] == "refuted":
        return f"No: {row['corrected']}"
    return "It was not decided."


def answered(rows: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the exercises whose claims are all in the ledger, with an answer from each."""
    return [
        {
            "name": e.name,
            "question": e.question,
            "claims": list(e.claims),
            "answers": [answer(rows[n]) for n in e.claims],
        }
        for e in EXERCISES
        if all(n in rows for n in e.claims)
    ]
