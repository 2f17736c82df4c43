"""Sum the published sweep up: a row a library, from reports/gallery/compliance/compliance.csv.

python benchmarks/sweep_summary.py
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from tabulate import tabulate

TABLE = Path(__file__).parent.parent / "reports" / "gallery" / "compliance" / "compliance.csv"


def main() -> None:
    """Print the table."""
    models = pd.read_csv(TABLE)
    models["library"] = models["model"].str.partition(":")[0]
    models = models[~models["library"].isin(["reference", "torch"])]
    counts = pd.crosstab(models["library"], models["verdict"])
    counts = counts.reindex(columns=["pass", "deviation", "open", "fail", "error"], fill_value=0)
    counts.insert(0, "models", counts.sum(axis=1))
    counts["= textbook"] = (models["textbook"] == "equal").groupby(models["library"]).sum()
    counts = counts.sort_values("models", ascending=False)
    counts.loc["together"] = counts.sum()
    rows = [{"library": name, **{k: v or "" for k, v in row.items()}} for name, row in counts.iterrows()]
    print(tabulate(rows, headers="keys", tablefmt="github"))


if __name__ == "__main__":
    main()
