"""How long `check` takes on torch.nn by profile, after import, and how much of it inside the subject.

    python benchmarks/check_speed.py [--profiles quick standard] > table.md

One process, one torch thread; ratios are comparable within one run of it, seconds are of the machine it ran on.
"""

from __future__ import annotations

import argparse
import platform

import pandas as pd
import torch

from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import select
from veriformer.properties.judging.run import run
from veriformer.properties.targets import load


def measure(target: str, profile: str) -> dict[str, object]:
    """Judge one shipped subject and return its row."""
    (subject,) = load(target)
    part = (report := run([subject], select(), Settings(profile=profile))).subjects[0]
    inside = sum(r.subject_seconds for r in part.results)
    return {
        "subject": subject.name,
        "profile": profile,
        "properties": part.applicable,
        "seconds": round(report.seconds, 2),
        "inside the subject": f"{inside / report.seconds:.0%}",
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", nargs="+", default=["quick", "standard"])
    profiles = parser.parse_args().profiles
    names = ("MultiheadAttention", "TransformerEncoderLayer", "TransformerEncoder", "TransformerEncoder-causal",
             "TransformerDecoderLayer", "Transformer", "scaled_dot_product_attention", "softmax")  # fmt: skip
    measure("torch:softmax", "quick")  # imports, first kernels
    rows = [measure(f"torch:{name}", profile) for name in names for profile in profiles]
    print(pd.DataFrame(rows).to_markdown(index=False))
    print(f"\ntorch {torch.__version__}, Python {platform.python_version()}, one thread")


if __name__ == "__main__":
    main()
