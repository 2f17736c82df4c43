"""Known deviations: failures that are declared, with a reason, so that they do not hide new ones.

A TOML file of `[[deviation]]` tables with `property`, `subject`, `reason`, and perhaps `link`, `expires` (a date),
`condition` (`{ torch = "2.13", device = "cpu" }`: it counts only where all of them fit) and `outcome = "open"` (it
excuses an open question, not a failure). The files in `known/`, one a library, are shipped.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from veriformer.properties.adapters.libraries import LIBRARIES
from veriformer.properties.results.records import ERROR, FAIL, OPEN, Report
from veriformer.reports.records import read_text

_KEYS = ("property", "subject", "reason", "link", "expires", "condition", "outcome")
_REQUIRED = ("property", "subject", "reason")
QUESTION = "open"
"""The `outcome` of an entry that excuses an open question and no failure."""
_CONDITIONS = ("python", "device", "profile")
"""What a condition may name beside packages whose release a report tells."""

_SHIPPED = Path(__file__).parent


class DeviationsError(ValueError):
    """A deviations file that cannot be relied on; says what to mend."""


@dataclass(frozen=True)
class Deviation:
    """One declared failure.

    Attributes:
        property: id.
        subject: name of the subject; `*` stands for any letters.
        reason: why it is so.
        link: to a public issue.
        condition: what of the environment must fit, by prefix.
        is_shipped: comes with this package; such behaviour depends on sizes and options of an instance (a fast path
            is taken or not), so that its absence is no finding.
        is_question: it excuses an open question, and neither a failure nor an error.
    """

    property: str
    subject: str
    reason: str
    link: str = ""
    condition: dict[str, str] = field(default_factory=dict)
    is_shipped: bool = False
    is_question: bool = False

    def excuses(self, outcome: str) -> bool:
        """Whether a property of this outcome is a declared deviation."""
        return outcome == OPEN or (outcome in (FAIL, ERROR) and not self.is_question)

    def fits(self, report: Report) -> bool:
        """Whether the environment of a run meets the condition."""
        facts = {**report.versions, "device": report.device, "profile": report.profile}
        return all(facts.get(name, "").startswith(value) for name, value in self.condition.items())

    def speaks_of(self, name: str, target: str) -> bool:
        """Whether it is about a subject of this name or target."""
        return any(map(self._spelled.fullmatch, (name, target)))

    @functools.cached_property
    def _spelled(self) -> re.Pattern[str]:
        spelled = ".*".join(map(re.escape, self.subject.split("*")))  # `many[0]` is a name, no class of letters
        return re.compile(spelled, re.DOTALL)


@dataclass
class Deviations:
    """All entries of a file.

    Attributes:
        entries: in the order of the file.
        path: of the file, for messages; "" for the shipped ones.
    """

    entries: list[Deviation] = field(default_factory=list)
    path: str = ""

    def must_speak_of(self, subjects: Iterable[tuple[str, str]]) -> None:
        """Raise if an entry of the user's own file is about no subject of the run.

        Args:
            subjects: pairs of name and target.
        """
        pairs = list(subjects)
        words = [word for pair in pairs for word in pair if word]
        for entry in self.entries:
            if entry.is_shipped or any(entry.speaks_of(*pair) for pair in pairs):
                continue
            close = difflib.get_close_matches(entry.subject, words, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise DeviationsError(
                f"{self.path}: the deviation from {entry.property!r} is about {entry.subject!r}, which is not in "
                f"this run; {hint}the subjects are: {', '.join(words[:12])}; --prune removes such entries"
            )

    def must_name(self, known: Iterable[str]) -> None:
        """Raise if an entry names a property that does not exist."""
        ids = list(known)
        for entry in self.entries:
            if entry.property not in ids:
                close = difflib.get_close_matches(entry.property, ids, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise DeviationsError(f"{self.path}: there is no property {entry.property!r}{hint}")


def read_deviations(path: Path | None, today: datetime.date | None = None) -> Deviations:
    """Read a deviations file; None gives those that are shipped (known behaviour of released libraries).

    Args:
        path: TOML file.
        today: for expiry; None: today.

    Raises:
        DeviationsError: the file is missing, no TOML, or an entry is misspelt, incomplete or expired.
    """
    if path is None:
        return Deviations(list(_shipped(today or datetime.date.today())))
    return Deviations([*_entries(path, today), *read_deviations(None).entries], str(path))


@cache
def _shipped(today: datetime.date) -> tuple[Deviation, ...]:
    entries = [entry for file in sorted(_SHIPPED.glob("*.toml")) for entry in _entries(file, today)]
    return tuple(replace(entry, is_shipped=True) for entry in entries)


def _entries(source: Path, today: datetime.date | None) -> list[Deviation]:
    try:
        raw = tomllib.loads(read_text(source))
    except FileNotFoundError:
        raise DeviationsError(
            f"there is no deviations file {source}; mend its name, or run `veriformer check` on your target once with "
            "--update-deviations, which writes what fails now into it"
        ) from None
    except OSError as problem:
        raise DeviationsError(f"{source} cannot be read: {problem.strerror}; name a TOML file") from None
    except RecursionError:
        raise DeviationsError(f"{source} nests its data too deeply; write [[deviation]] tables") from None
    except ValueError as problem:  # no TOML, no UTF-8, or a number of thousands of digits
        raise DeviationsError(f"{source} is no TOML: {problem}") from None
    tables = raw.get("deviation", [])
    if set(raw) - {"deviation"} or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise DeviationsError(
            f"{source}: write [[deviation]] tables, nothing else; there is {', '.join(list(map(repr, raw))[:12])}"
        )
    return [_entry(table, str(source), today or datetime.date.today()) for table in tables]


def _entry(table: dict[str, Any], path: str, today: datetime.date) -> Deviation:
    for key in table:
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise DeviationsError(f"{path}: an entry has the key {key!r}; {hint}the keys are: {', '.join(_KEYS)}")
    for key in _REQUIRED:
        if not isinstance(table.get(key), str) or not table[key].strip():
            raise DeviationsError(f"{path}: an entry has no {key!r}; every entry needs {', '.join(_REQUIRED)}")
    expires = table.get("expires")
    if isinstance(expires, datetime.datetime):
        expires = expires.date()  # whatever the time, it counts up to the end of its day
    if expires is not None and not isinstance(expires, datetime.date):
        raise DeviationsError(f"{path}: expires was {expires!r}; write a date such as 2027-01-31, without quotes")
    if expires is not None and expires < today:
        raise DeviationsError(
            f"{path}: the deviation of {table['subject']!r} from {table['property']!r} expired on {expires}; "
            "look at it again, then remove it or move the date"
        )
    if not isinstance(table.get("link", ""), str):
        raise DeviationsError(f"{path}: link was {table['link']!r}; write an address in quotes")
    condition = table.get("condition", {})
    known = {*_CONDITIONS, "torch", *(p for library in LIBRARIES.values() for p in library.packages)}
    if not isinstance(condition, dict) or set(condition) - known:
        raise DeviationsError(f"{path}: condition was {condition!r}; its keys are: {', '.join(sorted(known))}")
    outcome = table.get("outcome", "")
    if outcome not in ("", QUESTION):
        raise DeviationsError(
            f'{path}: outcome was {outcome!r}; write "{QUESTION}" where the entry excuses an open question alone, '
            "else leave it out"
        )
    return Deviation(
        table["property"], table["subject"], table["reason"], table.get("link", ""),
        {k: str(v) for k, v in condition.items()}, is_question=bool(outcome),
    )  # fmt: skip
