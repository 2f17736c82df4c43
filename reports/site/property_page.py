"""The page of one property, and the list of all, in Markdown: everything from records."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from veriformer.reports.readable import as_code, in_markdown
from veriformer.reports.site.formula import as_html
from veriformer.reports.site.tolerances import Judging

Record = Mapping[str, Any]
_LINK = re.compile(r"\s*([^<;]*?)\s*<(https?://[^>\s]+)>")
_TOLERANCES = {
    "measured": "Agreement up to rounding: the tolerance is [measured on the subject](../tolerances.md#measured).",
    "derived": "Agreement within a [derived bound](../tolerances.md#derived).",
    "exact": "Equality [to the bit](../tolerances.md#exact): no tolerance.",
    "differs": "A difference [beyond rounding](../tolerances.md#differs): the other side of the statement.",
    "finite": "Finite numbers, [every one](../tolerances.md#finite).",
    "require": "A [condition](../tolerances.md#conditions) on numbers that the check names.",
    "equal": "Equality of [what is no tensor](../tolerances.md#conditions): counts, texts, lists.",
}
_LEVELS = {
    "core": "core: a failure is a defect",
    "extended": "extended: follows from a convention, declared or usual",
}


def property_page(
    record: Record, faults: Sequence[Record], failure: Record | None, judging: Judging, requiring: Sequence[str]
) -> str:
    """Return the page of a property.

    Args:
        record: of the catalogue: id, statement, formula, source, explanation, level, kinds, requires, catches.
        faults: that show it failing: id, title, citation.
        failure: how it fails on one of them: fault, outcome, text; None if that was not recorded.
        judging: how it judges.
        requiring: ids of the properties that require it.
    """
    parts = [
        f"---\ntitle: {record['id']}\nhide: [navigation]\n---\n",
        f"# {record['id']}\n",
        f"**{in_markdown(record['statement'])}**\n",
        f"{as_html(record['formula'])}\n",
        _facts_of(record, requiring),
        "## Why it is true\n",
        _explanation(record["explanation"]),
        f"Source: {in_markdown(record['source'])}\n",
        "## What it catches\n",
        _faults(record, faults),
    ]
    if failure:
        parts += ["## What a failure looks like\n", _failure(failure, faults)]
    parts += ["## Tolerance\n", _tolerance(judging)]
    parts += [
        "## Try it\n",
        f"```bash\nveriformer explain {record['id']}\nveriformer check TARGET --only {record['id']}\n```\n",
    ]
    return "\n".join(parts)


def _facts_of(record: Record, requiring: Sequence[str]) -> str:
    family = record["id"].partition(".")[0]
    rows = [
        ("level", _LEVELS[record["level"]]),
        ("family", f"[{family}](index.md#{family})"),
        ("kinds", ", ".join(f"[{kind}](../kinds.md#{kind})" for kind in record["kinds"])),
        ("requires", ", ".join(f"[{i}]({i}.md)" for i in record["requires"])),
        ("required by", ", ".join(f"[{i}]({i}.md)" for i in requiring)),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {told} |" for name, told in rows if told), ""])


def _explanation(text: str) -> str:
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(in_markdown(" ".join(p.split())) for p in paragraphs) + "\n"


def _faults(record: Record, faults: Sequence[Record]) -> str:
    shown = {fault["id"] for fault in faults}
    found_first = sorted(faults, key=lambda fault: (not fault["citation"], fault["id"]))
    told = [f"- **{f['id']}** {in_markdown(f['title'])}{_cited(f['citation'])}" for f in found_first]
    others = [bug for bug in record["catches"] if bug not in shown and not any(i.startswith(f"{bug}-") for i in shown)]
    lines = [f"{_number(len(faults))} of the [fault zoo](../evidence.md) show it failing:\n", *told, ""] if told else []
    if others:
        codes = ", ".join(as_code(bug) for bug in others)
        lines += [f"It is meant to catch these documented defects too: {codes} (`veriformer explain {others[0]}`).", ""]
    return "\n".join(lines)


def _number(count: int) -> str:
    return "One fault" if count == 1 else f"{count} faults"


def _cited(citation: str) -> str:
    """Return where a fault was found, its addresses as links."""
    if not citation:
        return ""
    links = [f"[{in_markdown(words) or address}]({address})" for words, address in _LINK.findall(citation)]
    return " <br>Found in " + "; ".join(links) if links else f" <br>{in_markdown(citation)}"


def _failure(failure: Record, faults: Sequence[Record]) -> str:
    title = next((f["title"] for f in faults if f["id"] == failure["fault"]), "")
    is_open = failure["outcome"] == "OPEN"
    asked = ", which this property [asks about](../outcomes.md#open)" if is_open else ""
    return (
        f"On the fault **{failure['fault']}** ({in_markdown(title)}){asked}, as `veriformer check` prints it:\n\n"
        f'<pre class="screen" tabindex="0"><code>{html.escape(failure["text"], quote=False)}</code></pre>\n'
    )


def _tolerance(judging: Judging) -> str:
    lines = [f"- {text}" for use, text in _TOLERANCES.items() if use in judging.uses]
    file = judging.module.removeprefix("veriformer.").replace(".", "/") + ".py"
    lines += ["", f"The check is `{judging.check}` in `{file}`.", ""]
    if judging.expressions:
        written = "; ".join(as_code(told) for told in judging.expressions)
        lines += [f"Its bound, as it stands there: {written}.", ""]
    for bound in judging.bounds.values():
        told = in_markdown(bound.derivation).replace("``", "`")
        lines += [f"`{bound.name}` (`{bound.module.removeprefix('veriformer.')}`)", f":   {told}", ""]
    return "\n".join(lines)


def catalogue_page(records: Sequence[Record], faults: Mapping[str, Sequence[Record]]) -> str:
    """Return the page that lists every property, family by family.

    Args:
        records: of the catalogue, in its order.
        faults: that show each property failing, by its id.
    """
    families: dict[str, list[Record]] = {}
    for record in records:
        families.setdefault(record["id"].partition(".")[0], []).append(record)
    core = sum(record["level"] == "core" for record in records)
    lines = [
        "---\ntitle: The catalogue\n---\n",
        "# Properties\n",
        f"{len(records)} properties in {len(families)} families, {core} of them core. `veriformer list` prints them, "
        "`veriformer explain ID` one of them, and `--only ID` or `--only FAMILY` judges them alone.\n",
        " · ".join(f"[{family}](#{family})" for family in sorted(families)) + "\n",
    ]
    for family, members in sorted(families.items()):
        lines += [f"## {family} {{ #{family} }}\n", "| property | level | faults | |", "|---|---|--:|---|"]
        for record in members:
            name, number = record["id"], len(faults.get(record["id"], ()))
            lines.append(f"| [{name}]({name}.md) | {record['level']} | {number} | {in_markdown(record['statement'])} |")
        lines.append("")
    return "\n".join(lines)
