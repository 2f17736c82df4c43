"""`veriformer claims`: what the course notes say of Transformers, each statement tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from veriformer.cli.extras import insist_on
from veriformer.cli.options import FOLDER
from veriformer.cli.speaking import Unwritten, say, screen

UNFINISHED, VIOLATED, INTERRUPTED = 2, 1, 130
LEDGER = "claims.json"
TUNED = 2000
"""Seeds below it are for tuning: no number that is told of may come from one of them."""


@click.command()
@click.argument("ids", nargs=-1, metavar="[explain] [ID...]")
@click.option("--quick", is_flag=True, help="few seeds and small sizes: minutes")
@click.option(
    "--format", "form", type=click.Choice(["text", "json", "markdown", "html"]), default="text", show_default=True
)
@click.option(
    "--out",
    type=FOLDER,
    default=Path(".veriformer/claims"),
    show_default=True,
    help="folder of the ledger and of the trained models' records",
)
@click.option("--again", is_flag=True, help="test anew what is stored")
@click.option(
    "--first-seed",
    type=click.IntRange(TUNED, 2**31),
    help="repeat what is statistical on seeds from this one on, with an --out of its own",
)
def claims(ids: tuple[str, ...], quick: bool, form: str, out: Path, again: bool, first_seed: int | None) -> int:
    """Test what textbooks say of Transformers; `claims explain ID` shows derivation, evidence and command of one.

    A verdict follows from what was measured: holds, holds if (a condition), refuted (with what is true in its place),
    undecided, not testable here. What was tested with the same code is not tested again.

    Exit status: 0 every claim got a verdict, 1 one is undecided, 2 nothing could be tested, 3 usage.
    """
    insist_on("ablate", "veriformer claims")
    from veriformer.claims.claim import ledger
    from veriformer.claims.running import record_of, run
    from veriformer.reports.claims import FORMS, counts, explained, print_row
    from veriformer.reports.claims_figures import pictures
    from veriformer.reports.records import write_bytes, write_text

    explains = ids[:1] == ("explain",)
    known = ledger()
    chosen = [known[n] for n in _numbers(ids[1:] if explains else ids, tuple(known))]
    if explains and not ids[1:]:
        raise click.UsageError("explain needs the number of a claim: `veriformer claims explain 13`")
    stored = {} if again else _stored(out / LEDGER, quick, first_seed)
    text, err, unwritten, interrupted = screen(), screen(aside=True), Unwritten(), False
    kept, seen = dict(stored), list[dict[str, Any]]()

    def on_row(row: dict[str, Any]) -> None:
        seen.append(row)
        kept[row["number"]] = row
        if not unwritten.count:  # a full disk is told of once
            with unwritten.attempt("the ledger"):
                write_text(out / LEDGER, FORMS["json"][1](record_of(kept.values(), quick=quick, first_seed=first_seed)))
        if form == "text" and not explains:
            print_row(text, row)
        elif err.is_terminal:
            err.print(f"{len(seen)} of {len(chosen)}: claim {row['number']} {row['verdict']}", style="dim")

    try:
        run(chosen, quick=quick, stored=stored, folder=out, on_row=on_row, first_seed=first_seed)
    except KeyboardInterrupt:
        interrupted = True
        err.print("interrupted: what was tested is kept; go on with the same command")
    record = record_of(seen, quick=quick, first_seed=first_seed)
    with unwritten.attempt("the ledger"):
        whole = record_of(kept.values(), quick=quick, first_seed=first_seed)
        for name, make in FORMS.values():
            write_text(out / name, make(whole))
        for name, picture in pictures(whole).items():
            write_bytes(out / name, picture)
    if explains:
        say("\n\n".join(explained(row) for row in record["claims"]))
    elif form == "text":
        text.print(counts(record), style="bold")
        text.print(f"ledger: {out / FORMS['html'][0]}")
    else:
        say(FORMS[form][1](record), end="")
    verdicts = [row["verdict"] for row in record["claims"]]
    status = INTERRUPTED if interrupted else UNFINISHED if not verdicts else VIOLATED if "undecided" in verdicts else 0
    return unwritten.status(status)


def _numbers(words: tuple[str, ...], known: tuple[int, ...]) -> list[int]:
    """Return the numbers that were asked for, all without any."""
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) < 6 and int(word) in known):
            raise click.UsageError(f"there is no claim {word!r}; the claims are numbered {known[0]} to {known[-1]}")
    return sorted({int(word) for word in words}) or list(known)


def _stored(path: Path, quick: bool, first_seed: int | None) -> dict[int, dict[str, Any]]:
    """Return what an earlier run of the same code found; nothing where there was none."""
    from veriformer.claims.running import rows_of
    from veriformer.reports.records import read_text

    try:
        return rows_of(read_text(path), quick=quick, first_seed=first_seed) if path.exists() else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError, json.JSONDecodeError) as problem:
        raise click.UsageError(
            f"{path} cannot be gone on with: {problem}; move it away, or give another --out"
        ) from None
