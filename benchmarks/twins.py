"""Which released models are proved equal to the textbook's, and where the others part: a table.

python benchmarks/twins.py [LIBRARY ...] > reports/gallery/twins.md

Every encoder, decoder, encoder-decoder and classifier that is shipped for the libraries (default: those that are
installed) is judged by twin.equal at the sizes of profile quick, with weights drawn at random; nothing is downloaded.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.progress import track

from veriformer.properties import check
from veriformer.properties.adapters.libraries import LIBRARIES
from veriformer.properties.adapters.recognising import shipped

COMMIT = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]


def judge(library: str, name: str) -> dict[str, Any] | None:
    """Return a row for one subject; None for a kind that has no twin."""
    try:
        subject = shipped(library)[name]
    except Exception as problem:  # a library's own, at import
        return {"model": f"{library}:{name}", "outcome": "ERROR", "reason": f"{type(problem).__name__}: {problem}"}
    if subject.kind not in ("encoder", "decoder", "encoder_decoder", "classifier"):
        return None
    (result,) = check(subject, only=["twin.equal"], profile="quick").results
    return {
        "model": f"{library}:{name}", "outcome": result.outcome, "reason": result.reason.removeprefix("no twin: "),
        "error": result.error, "seconds": result.seconds,
    }  # fmt: skip


def main() -> None:
    """Judge and print."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    libraries = sys.argv[1:] or [name for name, entry in LIBRARIES.items() if not entry.missing()]
    console = Console(stderr=True)
    rows = []
    for library in libraries:
        for name in track(list(shipped(library)), description=library, console=console):
            row = judge(library, name)
            if row is not None:
                rows.append(row)
    table = pd.DataFrame(rows)
    commit = subprocess.run(COMMIT, capture_output=True, text=True, check=False).stdout.strip()
    proved = table[table.outcome == "PASS"]
    parted = table[table.outcome == "NOT_APPLICABLE"]
    asked = table[~table.outcome.isin(["PASS", "NOT_APPLICABLE"])]
    print("# Models proved equal to the textbook's\n")
    print(f"Made by `python benchmarks/twins.py {' '.join(libraries)}`, commit {commit}, torch {torch.__version__}.\n")
    print(f"Of {len(table)} models {len(proved)} are equal to the reference Transformer with their own")
    print(f"weights, {len(parted)} part from it, {len(asked)} are asked about or not judged. Equal means: the same")
    print("outputs up to the tolerance measured on the model, for drawn tokens and lengths and, where it takes a mask,")
    print("under padding and through the cache.\n")
    shown = proved.assign(textbook=proved.reason.str.removeprefix("equal to the textbook's model "))
    print(shown[["model", "textbook", "error", "seconds"]].to_markdown(index=False, floatfmt=".2g"))
    for title, part in (("Where the others part", parted), ("Asked, or not judged", asked)):
        print(f"\n## {title}\n")
        print(part[["model", "outcome", "reason"]].to_markdown(index=False))


if __name__ == "__main__":
    main()
