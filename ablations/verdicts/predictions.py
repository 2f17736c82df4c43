"""What became of a prediction."""

from __future__ import annotations

from veriformer.ablations.statistics.intervals import mean_interval
from veriformer.ablations.studies.study import Prediction
from veriformer.ablations.verdicts.rows import Row, pace, verdict

OUTCOMES = ("confirmed", "contradicted", "undecided", "theorem", "ceiling")
"""The first three are counted. A theorem could not have come out otherwise, nor could two models that both solve the
task be told to differ: such rows confirm nothing. A theorem that is violated is contradicted."""


def outcome(prediction: Prediction, row: Row) -> str:
    """Return one of `OUTCOMES`."""
    found, expected = verdict(row), prediction.expects
    if found in ("forced", "theorem violated"):
        kept = found == "forced" and (expected != "chance" or row.dead() == len(row.records))
        return "theorem" if kept else "contradicted"
    if expected == "chance":
        if row.dead() == len(row.records):
            return "confirmed"
        mean, chance = mean_interval(row.values("accuracy"), row.bounds), row.task.chance
        better = chance - mean.high if row.task.lower_is_better else mean.low - chance
        return "contradicted" if better > row.task.margin else "undecided"
    if expected in ("slower", "faster"):
        seen = pace(row)
        return "undecided" if not seen else "confirmed" if seen == expected else "contradicted"
    if expected in ("equivalent", "alike"):
        if row.at_ceiling:
            return "ceiling"
        if found in ("hurts", "helps"):
            return "contradicted"
        shown = ("equivalent",) if expected == "equivalent" else ("equivalent", "alike if alive")
        return "confirmed" if found in shown else "undecided"
    if found == expected:
        return "confirmed"
    return "undecided" if found in ("no evidence", "too few seeds") else "contradicted"
