"""`veriformer report`: show and render a stored record again: of a check, a sweep or an ablation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from veriformer.cli.extras import insist_on
from veriformer.cli.options import FOLDER
from veriformer.cli.speaking import Unwritten, say, screen
from veriformer.reports.formats import FORMATS, write_all


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["text", *FORMATS]), default="text", show_default=True,
              help="of a report.json, on standard output")  # fmt: skip
@click.option("--out", type=FOLDER, help="folder for all formats, tables, figures")
def report(file: Path, form: str, out: Path | None) -> int:
    """Show FILE, a `report.json` or an `ablation.json`, and with --out write everything that is made of it.

    Nothing in the file is executed. Exit status: that of the run that made it.
    """
    from veriformer.cli.ablate import show, status_of
    from veriformer.cli.reading import one_sentence, read_record
    from veriformer.properties.results.reading import whole
    from veriformer.reports.readable import cleaned
    from veriformer.reports.records import ABLATION, CASES, RecordError
    from veriformer.reports.schema import insist

    unwritten = Unwritten()
    try:
        record = read_record(file)
        with one_sentence(file, str(record.get("schema") or record.get("format"))[:60]):
            if str(record.get("schema", "")).startswith("veriformer-report/"):
                insist(record, str(file))
                return _show_report(whole(cleaned(record)), form, out, file.parent / CASES)
            if record.get("format") != ABLATION:
                raise RecordError(f"{file} is neither a veriformer-report/1 nor a {ABLATION}; give the file of a run")
            insist_on("ablate", "a report of an ablation")
            from veriformer.reports.ablation import write_report

            record = cleaned(record)
            show(record)
            if out is not None:
                with unwritten.attempt("the report"):
                    say(f"report: {write_report(record, out)[0]}")
            return unwritten.status(status_of(record))
    except RecordError as problem:
        raise click.UsageError(str(problem)) from None


def _show_report(record: dict[str, Any], form: str, out: Path | None, cases: Path) -> int:
    from veriformer.cli.recorded import repeated_from
    from veriformer.cli.unjudged import print_unjudged
    from veriformer.properties.results.reading import report_of
    from veriformer.reports.failure import print_failure
    from veriformer.reports.terminal import print_report
    from veriformer.reports.verdicts import shown_in_full, told_by

    unwritten, repeat = Unwritten(), repeated_from(cases)
    if out is not None:
        with unwritten.attempt("the report"):
            for path in write_all(record, out, repeat):
                say(f"written: {path}", aside=form != "text")
    if form != "text":
        say(FORMATS[form][1](record, repeat), end="")
        return unwritten.status(report_of(record).exit_status)
    console = screen()
    size = max((len(s["results"]) for s in record["subjects"]), default=0)
    statements = {name: told["statement"] for name, told in record["properties"].items()}
    print_report(console, print_unjudged(console, record), statements, size)
    for subject in record["subjects"]:
        others = told_by(subject)
        for result in shown_in_full(subject):
            statement, also = statements.get(result["id"], ""), others.get(result["id"], ())
            print_failure(console, result, statement, subject["name"], also=also,
                          **repeat(subject, result["counterexample"]))  # fmt: skip
    return unwritten.status(report_of(record).exit_status)
