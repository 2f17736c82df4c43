"""The studies; a module adds its own to `veriformer.ablations.studies.study.STUDIES`."""

from veriformer.ablations.measuring import initialisation, profiling
from veriformer.ablations.measuring.measurement import MEASUREMENTS
from veriformer.ablations.studies import core, depth, parts, training
from veriformer.ablations.studies.study import STUDIES

TABLE = "table"
"""What the table of parts removed is called beside the studies; see `veriformer.ablations.table`."""

DEFAULT = (TABLE,)
"""What `veriformer ablate` runs without an argument."""

__all__ = [
    "DEFAULT", "MEASUREMENTS", "STUDIES", "TABLE", "core", "depth", "initialisation", "parts", "profiling", "training",
]  # fmt: skip
