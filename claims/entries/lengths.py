"""What is said of sequences longer than those trained on."""

from __future__ import annotations

from veriformer.ablations.studies.study import Variant
from veriformer.ablations.trials.recipe import Recipe
from veriformer.claims.claim import claim
from veriformer.claims.entries.bases import FEW, SMALL, study
from veriformer.claims.evidence import Evidence
from veriformer.claims.numbers import mean_interval
from veriformer.claims.trained import Row, apart
from veriformer.reference.position_bias import AlibiBias

DECODER = {**SMALL, "positions": "rotary"}


@claim(
    7,
    "Sinusoidal encodings work beyond max_len, learned ones do not.",
    "A 3.3", "C 4.2",
    topic="positions",
    trains=True,
    derivation="The formula has a value at every p; a table of max_len rows has none beyond its last. That a "
    "formula has values does not make a trained model right there: nothing was learned at these positions.",
    condition="'works' means that the encoding is defined, not that a trained model is right there",
    cites="Press et al. 2022, figure 1.",
)  # fmt: skip
def beyond(see: Evidence) -> None:
    from veriformer.claims.entries.positions import refuses_beyond

    defined, refused = refuses_beyond()
    see.restricted("positions beyond 128 get finite values from the formula", defined)
    see.restricted("a learned table of 128 rows refuses position 128", refused)
    rows = copying(see)
    row = rows["copy", "", "sinusoidal"]
    see.written(
        "accuracy of copying twice the trained length less that at it, sinusoidal",
        mean_interval(row.values(lambda r: r["lengths"]["12"]) - row.accuracy),
        least=-0.05,
    )


def beyond_of(rows: dict[tuple[str, str, str], Row], positions: str) -> tuple[float, float]:
    """Return how much better these positions copy twice the trained length than the sinusoidal ones."""
    return apart(rows["copy", "", positions], rows["copy", "", "sinusoidal"], lambda r: r["lengths"]["12"])


def copying(see: Evidence) -> dict[tuple[str, str, str], Row]:
    recipe = Recipe(steps=300, learning_rate=3e-3, warm_up=40)
    return see.trained(
        study(
            "copying-beyond",
            DECODER,
            recipe,
            tuple(Variant(p, config={"positions": p}) for p in ("sinusoidal", "rotary", "alibi")),
            ("copy",),
            lengths=(12,),
        ),
        see.seeds(few=FEW),
    )


@claim(
    51,
    "Rotary dot products encode the relative position and keep norms; longer sequences than trained are handled "
    "better (the context is extendable with it).",
    "C 4.3",
    topic="positions",
    trains=True,
    formula=r"\langle R_i q, R_j k\rangle = \langle q, R_{j-i} k\rangle",
    derivation="Rotations of a plane compose by adding their angles. The product depends on i - j with its sign, "
    "not on |i - j|. Of lengths nothing follows: the slow channels turn by angles that were never seen.",
    condition="the first two halves; beyond the trained length copying fails with it too",
    cites="Su et al. 2021, section 3.2; Press et al. 2022, figure 1.",
)  # fmt: skip
def rotary(see: Evidence) -> None:
    from veriformer.claims.entries.positions import rotary_numbers

    same, norms, sign = rotary_numbers()
    see.restricted("largest change of the product of a pair 3 apart over positions to 500", same, most=1e-10)
    see.restricted("largest relative change of a norm over positions to 5000", norms, most=1e-12)
    see.restricted("difference of the products 3 to the left and 3 to the right", sign, least=1e-3)
    see.properties(["rotary.relative", "rotary.isometry"], ["reference:rotary"], role="restricted")
    rows = copying(see)
    row = rows["copy", "", "rotary"]
    see.written(
        "accuracy of copying twice the trained length, rotary less sinusoidal", beyond_of(rows, "rotary"), least=0.0
    )
    see.written(
        "accuracy of copying twice the trained length less that at it, rotary",
        mean_interval(row.values(lambda r: r["lengths"]["12"]) - row.accuracy),
        least=-0.05,
    )


@claim(
    52,
    "ALiBi has one trainable scalar per head, and extrapolates better.",
    "E 4.3",
    topic="positions",
    trains=True,
    formula=r"b_h(i, j) = -m_h |i - j|, \quad m_h = 2^{-8h/H}",
    derivation="The slopes are fixed, a geometric sequence; the authors tried trained ones and kept them fixed. "
    "Whether it extrapolates better depends on the task: Press et al. measured language, here sequences are copied.",
    corrected="One fixed slope per head; the bias is defined at every length and falls with the distance.",
    cites="Press et al. 2022, section 3.",
)  # fmt: skip
def alibi(see: Evidence) -> None:
    bias = AlibiBias(4)
    see.written("trainable numbers in the bias of 4 heads", sum(p.numel() for p in bias.parameters()), least=4, most=4)
    see.corrected("trainable numbers in the bias of 4 heads", sum(p.numel() for p in bias.parameters()), most=0)
    better = beyond_of(copying(see), "alibi")
    see.written("accuracy of copying twice the trained length, ALiBi less sinusoidal", better, least=0.0)
    see.properties(["alibi.slopes", "alibi.monotone"], ["reference:alibi"], role="corrected")
