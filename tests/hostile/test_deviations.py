"""Deviations files of any content: each ends in a sentence or is read."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from hostile.samples import BYTES
from veriformer.properties.known.deviations import Deviation, DeviationsError, read_deviations
from veriformer.properties.known.editing import pruned, recorded
from veriformer.properties.results.records import Report, Result, SubjectReport

ENTRY = '[[deviation]]\nproperty = "norm.definition"\nsubject = "mine"\nreason = "as in the paper"\n'
WRONG = {
    **{name: content for name, content in BYTES.items() if name not in ("nothing",)},
    "a list of numbers": b"deviation = [1]",
    "a list of lists": b"deviation = [[]]",
    "a table": b"[deviation]\nproperty = 'x'\n",
    "a number where the list is": b"deviation = 1",
    "5,000 deep": b"a = " + b"[" * 5000 + b"]" * 5000,
    "200,000 deep": b"a = " + b"[" * 200_000,
    "5,000 tables deep": b"[" + b".".join([b"a"] * 5000) + b"]\n",
    "a number of 5,000 digits": b"a = " + b"9" * 5000,
    "another date": ENTRY.encode() + b"expires = 2027-99-99\n",
    "a time": ENTRY.encode() + b"expires = 07:32:00\n",
    "a date in quotes": ENTRY.encode() + b'expires = "2027-01-01"\n',
    "long expired": ENTRY.encode() + b"expires = 0001-01-01T00:00:00Z\n",
    "a link that is none": ENTRY.encode() + b"link = 7\n",
    "a link in a list": ENTRY.encode() + b'link = ["x"]\n',
    "a condition that is none": ENTRY.encode() + b"condition = 7\n",
    "a condition of something": ENTRY.encode() + b"condition = { x = 1 }\n",
    "a key too many": ENTRY.encode() + b'"\\u001b[31m" = 1\n',
    "a reason that is none": ENTRY.replace('"as in the paper"', "7").encode(),
    "a subject that is none": ENTRY.replace('"mine"', "[1]").encode(),
    "an outcome that is none": ENTRY.encode() + b"outcome = 7\n",
    "a list of outcomes": ENTRY.encode() + b"outcome = ['open']\n",
    "an empty reason": ENTRY.replace("as in the paper", " ").encode(),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_deviations_file_ends_in_a_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    path.write_bytes(WRONG[name])
    with pytest.raises(DeviationsError, match=r"known\.toml") as caught:
        read_deviations(path)
    assert len(str(caught.value)) < 1500


def test_what_is_no_file_ends_in_a_sentence(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / ("x" * 300), Path("/dev/null/x")):
        with pytest.raises(DeviationsError):
            read_deviations(path)


@pytest.mark.parametrize(
    "written", ["2027-01-31", "2027-01-31T12:00:00", "2027-01-31T12:00:00Z", "2027-01-31 23:59:59+14:00"]
)
def test_a_date_with_a_time_counts_to_the_end_of_its_day(written: str, tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    path.write_text(f"{ENTRY}expires = {written}\n")
    assert read_deviations(path, datetime.date(2027, 1, 31)).entries[0].subject == "mine"
    with pytest.raises(DeviationsError, match="expired on 2027-01-31"):
        read_deviations(path, datetime.date(2027, 2, 1))


@pytest.mark.parametrize(
    ("pattern", "word", "fits"),
    [("many[0]", "many[0]", True), ("many[0]", "many0", False), ("m.py:many[[]0]", "m.py:many[0]", False),
     ("m*", "many[0]", True), ("*[0]", "m.py:many[0]", True), ("m?ne", "mine", False), ("m.ne", "mine", False),
     ("*", "a\nb", True), ("**", "", True), ("[!a]", "b", False), ("Mine", "mine", False)],
)  # fmt: skip
def test_only_the_star_stands_for_letters(pattern: str, word: str, fits: bool) -> None:
    assert Deviation("norm.definition", pattern, "why").speaks_of(word, "another") is fits


def _report() -> Report:
    failing = Result("norm.definition", "core", "FAIL", "x")
    return Report([SubjectReport("mine", "norm", "m.py:many[0]", results=[failing])], 0, "quick")


@pytest.mark.parametrize(
    "text",
    ["", "\n", "# a comment\n", "deviation = []\n", ENTRY,
     "deviation = [{property = 'loss.x', subject = 'a', reason = 'b'}]\n",
     "deviation = [\n  {property = 'loss.x', subject = 'a', reason = 'b'}, # why\n]\n"],
)  # fmt: skip
def test_every_form_of_a_file_can_be_added_to_and_pruned(text: str, tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    path.write_text(text)
    before = len(read_deviations(path).entries)
    done = recorded(_report(), text, 'a "reason" with \\ and \u202e')
    path.write_text(added := done.text)
    found = read_deviations(path).entries
    assert (done.added, len(found)) == (1, before + 1)
    mine = [entry for entry in found if entry.subject == "m.py:many[0]"]
    assert mine[0].reason == 'a "reason" with \\ and \u202e'
    path.write_text(pruned(added, mine)[0])
    assert len(read_deviations(path).entries) == before
    assert pruned(text, mine) == (text, 0)
