"""What is no regular file is neither waited for nor replaced, wherever one is read or written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hostile.running import run
from veriformer.ablations.execution.store import Store, StoreError
from veriformer.cli.processes.judged_store import JudgedStore
from veriformer.properties.known.deviations import DeviationsError, read_deviations
from veriformer.reports.records import read_bytes, read_text, write_bytes

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFO on this system")


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with a FIFO that nobody writes or reads: who opens it as a file waits for ever."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "fifo.json"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("report", "fifo.json"),
        ("compare", "fifo.json", "fifo.json"),
        ("replay", "fifo.json"),
        ("check", "torch:softmax", "--deviations", "fifo.json"),
        ("claims", "1", "--out", "claims"),
        ("ablate", "schedules", "--out", "ablations"),
    ],
    ids=lambda words: words[0],
)
def test_a_command_refuses_a_fifo_in_one_sentence(fifo: Path, words: tuple[str, ...]) -> None:
    for folder, name in (("claims", "claims.json"), ("ablations", "trials.sqlite")):
        (fifo.parent / folder).mkdir()
        os.mkfifo(fifo.parent / folder / name)
    told = run(*words).insist()
    assert told.status == 3, told
    assert "file" in told.sentence


@pytest.mark.parametrize("kind", ["FIFO", "folder", "device", "link to a device"])
def test_only_files_are_read(fifo: Path, kind: str) -> None:
    (folder := fifo.parent / "folder").mkdir()
    (link := fifo.parent / "link").symlink_to("/dev/zero")
    path = {"FIFO": fifo, "folder": folder, "device": Path("/dev/zero"), "link to a device": link}[kind]
    with pytest.raises(OSError, match=f"it is a {kind.split()[-1]}, and a file is required"):
        read_bytes(path)
    with pytest.raises(DeviationsError, match="file"):
        read_deviations(path)


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"\xc3\xa4" * 10**6)
    assert read_text(tmp_path / "one") == "ä" * 10**6
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")


def test_what_is_no_file_is_not_replaced(fifo: Path) -> None:
    (link := fifo.parent / "link").symlink_to(fifo)
    for path in (fifo, link):
        with pytest.raises(OSError, match="it is a FIFO"):
            write_bytes(path, b"report")
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert link.is_symlink()
    assert sorted(os.listdir(fifo.parent)) == ["fifo.json", "link"]


def test_stores_are_files(fifo: Path) -> None:
    with pytest.raises(StoreError, match="is no file"):
        Store(fifo)
    store = JudgedStore(fifo, "key")
    with pytest.raises(OSError, match="file"):
        store.read()
    with pytest.raises(OSError, match="file"):
        store.append("name", {})
