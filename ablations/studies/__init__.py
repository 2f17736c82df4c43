"""The studies; a module adds its own to `veriformer.ablations.studies.study.STUDIES`."""

from veriformer.ablations.measuring import initialisation, profiling
from veriformer.ablations.measuring.measurement import MEASUREMENTS
from veriformer.ablations.studies import core, parts, training
from veriformer.ablations.studies.study import STUDIES

DEFAULT = ("positions", "residual", "norm", "warm-up")
"""What `veriformer ablate` runs without an argument."""

__all__ = ["DEFAULT", "MEASUREMENTS", "STUDIES", "core", "initialisation", "parts", "profiling", "training"]
