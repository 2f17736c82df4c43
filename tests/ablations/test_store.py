"""The store: durable, shared, and strict about what it opens."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from veriformer.ablations.execution.store import Store, StoreError


def finished(*keys: str) -> list[tuple[str, dict[str, str], dict[str, float]]]:
    return [(key, {"task": "precede"}, {"accuracy": 0.5}) for key in keys]


def test_what_is_added_is_there_after_reopening(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        store.add(finished("a", "b"))
    with Store(tmp_path / "s.sqlite") as store:
        assert store.get(["a", "b", "c"]) == {"a": {"accuracy": 0.5}, "b": {"accuracy": 0.5}}


def test_a_key_keeps_what_it_has(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        store.add(finished("a"))
        store.add([("a", {}, {"accuracy": 0.9})])
        assert store.get(["a"])["a"]["accuracy"] == 0.5


def test_many_keys_at_once(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        keys = [f"k{i}" for i in range(2500)]
        store.add(finished(*keys))
        assert len(store.get(keys)) == 2500


def test_two_runs_share_a_store(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    Store(path).close()

    def write(name: str) -> None:
        with Store(path) as mine:
            for i in range(40):
                mine.add(finished(f"{name}{i}", f"both{i}"))

    threads = [threading.Thread(target=write, args=(name,)) for name in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Store(path) as store:
        assert len(store.get([f"{n}{i}" for n in ("x", "y", "both") for i in range(40)])) == 120


WRITER = """
import itertools, pathlib, sys
from veriformer.ablations.execution.store import Store
with Store(pathlib.Path(sys.argv[1])) as store:
    for i in itertools.count():
        store.add([(f"{sys.argv[2]}-{i}", {}, {"curve": [0.5] * 1000})])
        print(i, flush=True)
"""


@pytest.mark.parametrize("few", [0, 1, 7, 20])
def test_a_kill_at_any_moment_costs_nothing_that_was_stored(few: int, tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    told: list[str] = []
    for name in ("first", "second"):
        command = [sys.executable, "-c", WRITER, str(path), name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writing:
            assert writing.stdout is not None
            told += [f"{name}-{writing.stdout.readline().strip()}" for _ in range(few)]
            writing.kill()
            told += [f"{name}-{line.strip()}" for line in writing.stdout if line.endswith("\n")]
    with Store(path) as store:
        found = store.get(told)
    assert len(found) == len(told) >= 2 * few
    assert all(record == {"curve": [0.5] * 1000} for record in found.values())


def test_settings_of_the_last_run(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        assert store.last_settings() is None
        store.begin({"seeds": 3})
        store.begin({"seeds": 4})
        assert store.last_settings() == {"seeds": 4}


def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    path.write_text("my thesis" * 1000)
    with pytest.raises(StoreError, match=r"s\.sqlite is no store of trials, or damaged; move it away"):
        Store(path)
    assert path.read_text() == "my thesis" * 1000


def test_somebody_elses_database_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE photos (id INTEGER)")
    other.close()
    with pytest.raises(StoreError, match="an SQLite file of something else; name another folder with --out"):
        Store(path)
    with sqlite3.connect(path) as other:
        assert [row[0] for row in other.execute("SELECT name FROM sqlite_master")] == ["photos"]
    other.close()


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as base:
        base.execute("PRAGMA user_version = 99")
    base.close()
    with pytest.raises(StoreError, match="a store of version 99, this veriformer reads version 1"):
        Store(path)


def test_a_damaged_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.add(finished(*[f"key {i}" for i in range(2000)]))
    content = bytearray(path.read_bytes())
    content[8192:20000] = b"\xff" * (20000 - 8192)
    path.write_bytes(bytes(content))
    with pytest.raises(StoreError, match=r"damaged; move it away"):
        Store(path)


def test_a_full_disk_is_one_sentence_and_costs_nothing_that_was_stored(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.add(finished("before"))
        # SQLite answers as on a full disk once the file may not grow any more
        pages = store._base.execute("PRAGMA page_count").fetchone()[0]
        store._base.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreError, match=r"the disk of .* is full; free some space and run again with --resume"):
            store.add([("big", {}, {"curve": [0.5] * 100_000})])
    with Store(path) as store:
        assert set(store.get(["before", "big"])) == {"before"}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="name another folder with --out"):
        Store(tmp_path / "file" / "s.sqlite")
