"""`veriformer report`: show and render a stored record again."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="folder for page, tables and figures")
def report(file: Path, out: Path | None) -> int:
    """Show FILE, an `ablation.json`, and with --out write its page, tables and figures again.

    Nothing in the file is executed.
    """
    from veriformer.cli.ablate import show, status_of
    from veriformer.reports.ablation import FORMAT, write_report
    from veriformer.reports.records import RecordError, read_json

    try:
        record = read_json(file)
        if record.get("format") != FORMAT:
            raise RecordError(f"{file} has format {record.get('format')!r}; this command renders {FORMAT}")
        try:
            show(record)
            if out is not None:
                click.echo(f"report: {write_report(record, out)[0]}")
            return status_of(record)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as problem:
            raise RecordError(f"{file} is no whole {FORMAT} record ({type(problem).__name__}: {problem})") from None
    except RecordError as problem:
        raise click.UsageError(str(problem)) from None
    except OSError as problem:
        raise click.UsageError(f"{problem.filename or out}: {problem.strerror}; name another file or folder") from None
