"""Finished trials on disk: durable at once, never lost, never mixed up. SQLite in WAL mode.

One process writes; another run may write to the same file beside it, and both find each other's trials.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

APPLICATION = 0x76666162
"""SQLite's application id of a store: `vfab`."""

VERSION = 1
"""Of the tables; a store of another version is refused."""

_TABLES = """
CREATE TABLE trials (key TEXT PRIMARY KEY, trial TEXT NOT NULL, record TEXT NOT NULL, finished TEXT NOT NULL);
CREATE TABLE runs (number INTEGER PRIMARY KEY, settings TEXT NOT NULL, started TEXT NOT NULL);
"""


def _parsed(text: object) -> dict[str, Any]:
    record = json.loads(text) if isinstance(text, str) else None
    if not isinstance(record, dict):
        raise TypeError("no JSON object")
    return record


class StoreError(Exception):
    """The store cannot be used; says which file, why, and what to do."""


class Store:
    """Trials by their key.

    Raises:
        StoreError: the file is no store, one of another version, damaged, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():  # SQLite would wait for a FIFO
            raise StoreError(f"{path} is no file, and the store is one; name another folder with --out")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # a run waits for another's commit, which takes milliseconds, for as long as a slow disk may need
            self._base = sqlite3.connect(path, timeout=60, isolation_level=None)
            self._open()
        except OSError as problem:
            raise StoreError(
                f"{path} cannot be opened: {problem.strerror or problem}; name another folder with --out"
            ) from None
        except sqlite3.Error as problem:
            raise self._error(problem) from None

    def _open(self) -> None:
        ask = self._base.execute
        if ask("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise StoreError(f"{self.path} is damaged; move it away and run again, or name another folder with --out")
        ask("PRAGMA journal_mode = WAL")
        ask("PRAGMA synchronous = FULL")  # a commit survives a loss of power, not only of the process
        ask("BEGIN IMMEDIATE")
        application, version = ask("PRAGMA application_id").fetchone()[0], ask("PRAGMA user_version").fetchone()[0]
        is_empty = ask("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if application == 0 and version == 0 and is_empty:
            for statement in _TABLES.strip().splitlines():
                ask(statement)
            ask(f"PRAGMA application_id = {APPLICATION}")
            ask(f"PRAGMA user_version = {VERSION}")
        ask("COMMIT")
        if not is_empty and application != APPLICATION:
            raise StoreError(f"{self.path} is an SQLite file of something else; name another folder with --out")
        if not is_empty and version != VERSION:
            raise StoreError(
                f"{self.path} is a store of version {version}, this veriformer reads version {VERSION}; "
                "name another folder with --out"
            )

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; everything added is on disk already."""
        self._base.close()

    def add(self, finished: Iterable[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> None:
        """Store (key, trial, record), all or none; a key that is there already keeps what it has.

        Raises:
            StoreError: the disk is full, or the file cannot be written. What was stored before is whole.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        rows = [(key, json.dumps(trial), json.dumps(record, allow_nan=False), now) for key, trial, record in finished]
        try:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                self._base.executemany("INSERT OR IGNORE INTO trials VALUES (?, ?, ?, ?)", rows)
                self._base.execute("COMMIT")
            except BaseException:
                if self._base.in_transaction:
                    self._base.execute("ROLLBACK")
                raise
        except sqlite3.Error as problem:
            raise self._error(problem) from None

    def get(self, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the records of those keys that are stored.

        Raises:
            StoreError: one of them is no record, or the tables are not those of a store.
        """
        found: dict[str, dict[str, Any]] = {}
        wanted = list(keys)
        try:
            for start in range(0, len(wanted), 500):
                part = wanted[start : start + 500]
                marks = ",".join("?" * len(part))
                rows = self._base.execute(f"SELECT key, record FROM trials WHERE key IN ({marks})", part)
                found.update((key, _parsed(record)) for key, record in rows)
        except sqlite3.Error as problem:
            raise self._error(problem) from None
        except (TypeError, ValueError, RecursionError):
            raise self.damaged("a trial in it has no record") from None
        return found

    def damaged(self, why: str) -> StoreError:
        """Return the error of a store that holds what no run has written."""
        return StoreError(
            f"{self.path} is damaged: {why}; move it away and run again, or name another folder with --out"
        )

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Write down what a run is about, so that `--resume` can go on with it."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            self._base.execute("INSERT INTO runs (settings, started) VALUES (?, ?)", (json.dumps(settings), now))
        except sqlite3.Error as problem:
            raise self._error(problem) from None

    def last_settings(self) -> dict[str, Any] | None:
        """Return the settings of the latest run, if there is one.

        Raises:
            StoreError: they are no settings.
        """
        try:
            row = self._base.execute("SELECT settings FROM runs ORDER BY number DESC LIMIT 1").fetchone()
            return _parsed(row[0]) if row else None
        except sqlite3.Error as problem:
            raise self._error(problem) from None
        except (TypeError, ValueError, RecursionError):
            raise self.damaged("its last run has no settings") from None

    def _error(self, problem: sqlite3.Error) -> StoreError:
        code = getattr(problem, "sqlite_errorcode", None)
        primary = code & 0xFF if code is not None else None
        if primary == sqlite3.SQLITE_FULL:
            return StoreError(
                f"the disk of {self.path} is full; free some space and run again with --resume: "
                "every finished trial up to here is stored"
            )
        if primary in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return StoreError(
                f"{self.path} is no store of trials, or damaged; move it away, or name another folder with --out"
            )
        return StoreError(f"{self.path} cannot be used ({problem}); name another folder with --out")
