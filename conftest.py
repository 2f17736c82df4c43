"""Settings of the whole test run: one torch thread a worker, Hypothesis profiles, what is not collected."""

from __future__ import annotations

import os

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # before torch is imported; several workers share the cores
    os.environ.setdefault(_variable, "1")

from hypothesis import HealthCheck, settings  # noqa: E402

collect_ignore = [
    "claims",
    "clusters",
    "reference",
    "properties",
    "ablations",
    "reports",
    "cli",
    "src",
    "build",
    "examples",
    "benchmarks",
]
"""The packages at the top level hold no tests; `veriformer.properties` is tested under tests/."""

settings.register_profile("quick", max_examples=5, deadline=None)
settings.register_profile("standard", max_examples=20, deadline=None)
settings.register_profile("thorough", max_examples=100, deadline=None)
settings.register_profile(
    "ci", max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "standard"))
