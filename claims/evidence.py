"""What the function of a claim writes its findings into, and the instruments that it finds there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veriformer.claims.finding import Finding

if TYPE_CHECKING:
    from veriformer.ablations.studies.study import Study
    from veriformer.claims.trained import Row

Measured = float | int | bool | tuple[float, float]


@dataclass
class Evidence:
    """The findings of one claim.

    Attributes:
        quick: whether few seeds and small sizes are asked for.
        folder: where trained models' records are kept.
        first_seed: of statistical findings; None: the usual.
        findings: so far.
        shown: numbers that belong to the claim and decide nothing: rows of a table, points of a curve.
        drawn: seeds that findings were measured on.
    """

    quick: bool = False
    folder: Path | None = None
    first_seed: int | None = None
    findings: list[Finding] = field(default_factory=list)
    shown: dict[str, Any] = field(default_factory=dict)
    drawn: set[int] = field(default_factory=set)

    def written(self, says: str, value: Measured, **limits: Any) -> None:
        """Add a finding on the statement as it is written."""
        self._add("written", says, value, **limits)

    def restricted(self, says: str, value: Measured, **limits: Any) -> None:
        """Add a finding on the statement under the claim's condition."""
        self._add("restricted", says, value, **limits)

    def corrected(self, says: str, value: Measured, **limits: Any) -> None:
        """Add a finding on the statement that is put in its place."""
        self._add("corrected", says, value, **limits)

    def show(self, name: str, value: Any) -> None:
        """Keep numbers that are shown beside the findings."""
        self.shown[name] = value

    def properties(self, ids: Sequence[str], subjects: Sequence[str], role: str = "written", seed: int = 0) -> None:
        """Judge shipped subjects by properties: none may fail, and each must hold for one subject at least.

        Args:
            ids: of the properties.
            subjects: shipped subjects, as `reference:Decoder`.
            role: what the finding speaks for.
            seed: of every random choice.
        """
        from veriformer.claims.judging import judged

        failed, held, examples = judged(tuple(ids), tuple(subjects), "quick" if self.quick else "standard", seed)
        how = f"properties {', '.join(ids)}"
        self._add(role, f"properties that do not hold for {', '.join(subjects)}", failed, most=0, how=how)
        self._add(role, f"properties that were shown on them ({examples} cases)", held, least=len(ids), how=how)

    def seeds(self, number: int | None = None, few: int | None = None) -> range:
        """Return the seeds that a statistical finding is measured on: `number` or the usual, `few` or the usual few."""
        from veriformer.claims.trained import QUICK_SEEDS, SEEDS, seeds_of

        seeds = seeds_of(self.quick, number or SEEDS, few or QUICK_SEEDS, self.first_seed)
        self.drawn.update(seeds)
        return seeds

    def trained(self, study: Study, seeds: range | None = None) -> dict[tuple[str, str, str], Row]:
        """Return the trained rows of a study by (task, setting, variant); what is stored is not trained again."""
        from veriformer.claims.trained import trained

        chosen = self.seeds() if seeds is None else seeds
        return trained(study, seeds=chosen, folder=self.folder, together=self.quick)

    def _add(
        self,
        role: str,
        says: str,
        value: Measured,
        *,
        least: float = -math.inf,
        most: float = math.inf,
        how: str = "measured",
    ) -> None:
        low, high = value if isinstance(value, tuple) else (value, value)
        if isinstance(value, bool):  # a statement that is true or not: it must be true
            least = most = 1.0
        self.findings.append(
            Finding(
                says=says, role=role, low=float(low), high=float(high), least=float(least), most=float(most), how=how
            )
        )
