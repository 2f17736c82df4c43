"""The studies; a module adds its own to `veriformer.ablations.study.STUDIES`."""

from veriformer.ablations import initialisation, profiling
from veriformer.ablations.measurement import MEASUREMENTS
from veriformer.ablations.studies import core, parts, training
from veriformer.ablations.study import STUDIES

DEFAULT = ("positions", "residual", "norm", "warm-up")
"""What `veriformer ablate` runs without an argument."""

__all__ = ["DEFAULT", "MEASUREMENTS", "STUDIES", "core", "initialisation", "parts", "profiling", "training"]
