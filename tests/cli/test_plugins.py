"""What a project or a package adds is judged and told like our own; what cannot be taken costs a sentence."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from veriformer.cli.own_studies import load_studies
from veriformer.cli.plugged import plugged
from veriformer.properties.adapters.plugins import installed

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"
ORIGIN = "house_norms.plugin (pyproject.toml)"

STUDY = """
from dataclasses import replace
from veriformer.ablations.studies import STUDIES

mine = replace(STUDIES["closing-norm"], name="house-closing-norm")
"""

NORM = """
import torch
from torch import nn
from house_norms.norm import HouseNorm


class Leaning(HouseNorm):
    def forward(self, x):
        right = super().forward(x)
        return right + 0.1 * right.abs()
"""


@pytest.fixture
def project(tmp_path: Path, veriformer: object) -> Path:
    """Return the folder that one stands in, with the example's plug-in and a broken norm in it."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "leaning.py").write_text(NORM, encoding="utf-8")
    return tmp_path


def test_what_a_plugin_adds_is_told_with_its_origin(veriformer, project: Path) -> None:
    records = json.loads(veriformer("list", "--kind", "norm", "--format", "json", status=0).stdout)
    assert records[-1]["id"] == "house.odd"
    assert (records[-1]["origin"], records[-1]["faults_killed"]) == (ORIGIN, ["HOUSE-LEAN"])
    assert {r["origin"] for r in records[:-1]} == {"veriformer"}
    told = veriformer("explain", "house.odd", status=0)
    assert f"origin    {ORIGIN}" in told.stdout
    assert f"plug-ins: {ORIGIN}" in told.stderr


def test_a_property_of_a_plugin_is_judged_and_proves_that_it_can_fail(veriformer, project: Path) -> None:
    ran = veriformer("check", "leaning.py:Leaning", "torch:LayerNorm", "--only", "house.odd", "--profile", "quick",
                     "--format", "json", status=1)  # fmt: skip
    leaning, right = json.loads(ran.stdout)["subjects"]
    assert [leaning["results"][0]["outcome"], right["results"][0]["outcome"]] == ["FAIL", "PASS"]
    assert leaning["facts"]["structure"] == "other", "the plug-in's adapter was not asked"
    assert right["power"]["faults"] == [
        {"name": "a norm leans to one side", "noticed_by": "house.odd",
         "matters": "a bias that no parameter holds, and no weight decay reaches"}
    ]  # fmt: skip
    case = leaning["results"][0]["counterexample"]["id"]
    assert "house.odd" in veriformer("replay", case, "--target", "leaning.py:Leaning", status=1).stdout


def test_what_a_plugin_ships_is_swept_and_its_faults_are_killed(veriformer, project: Path) -> None:
    ran = veriformer("mutants", "--only", "HOUSE-LEAN", "--format", "json", status=0)
    (row,) = json.loads(ran.stdout)["mutants"]
    assert "house.odd" in row["killed_by"]
    assert row["expected"] == ["house.odd"]
    ran = veriformer("sweep", "house_norms.plugin", "--level", "core", "--format", "json")
    (subject,) = json.loads(ran.stdout)["subjects"]
    assert subject["target"] == "house_norms.plugin:norm"
    assert {r["id"]: r["outcome"] for r in subject["results"]}["house.odd"] == "PASS"


def test_what_is_installed_is_found_by_its_entry_point(
    veriformer, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "pyproject.toml").unlink()
    about = project / "house_norms-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: house-norms\nVersion: 0.1\n", encoding="utf-8")
    (about / "entry_points.txt").write_text("[veriformer.plugins]\nhouse = house_norms.plugin\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(project)])
    assert [str(one) for one in installed()] == ["house (house-norms 0.1)"]
    ran = veriformer("check", "house:norm", "--only", "house.odd", "--profile", "quick", status=0)
    assert "1 pass of 1 applicable" in ran.stdout
    assert "plug-ins: house (house-norms 0.1)" in ran.stderr


def test_a_study_of_a_plugin_is_listed_and_found(veriformer, project: Path) -> None:
    (project / "studies_here.py").write_text(STUDY, encoding="utf-8")
    (project / "pyproject.toml").write_text('[tool.veriformer]\nplugins = "studies_here"\n', encoding="utf-8")
    listed = json.loads(veriformer("ablate", "--list", "--format", "json", status=0).stdout)
    assert listed[-1]["name"] == "house-closing-norm"
    assert listed[-1]["origin"] == "studies_here (pyproject.toml)"
    (study,) = load_studies(plugged().studies["house-closing-norm"]["target"])
    assert study.name == "house-closing-norm"


HOLDS = """
from veriformer.properties import holds

@holds({id!r}, statement="It holds.", formula="", source="", kinds=["norm"]{more})
def it_holds(case):
    \"\"\"Always.\"\"\"
"""


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (HOLDS.format(id="norm.definition", more=""), "property id 'norm.definition' is taken by"),
        (HOLDS.format(id="mine.x", more=", requires=['no.such']"), "mine.x requires 'no.such', which does not exist"),
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("raise SystemExit(7)", "cannot be imported: SystemExit: 7 (mine.py, line 1)"),
        ("def f(:", "SyntaxError"),
        ("SHIPPED = [1]", "its SHIPPED is a list; subjects by their names are required"),
        ("from veriformer.tests.mutants import fault\n@fault('NM01', 'x', killed_by=())\ndef f(): pass",
         "'NM01' is there already"),
        (None, "the plug-in mine (pyproject.toml) is not there: no module 'mine' beside pyproject.toml"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_costs_a_sentence(veriformer, tmp_path: Path, source: str | None, why: str) -> None:
    if source is not None:
        (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text('[tool.veriformer]\nplugins = ["mine"]\n', encoding="utf-8")
    for words in (["list"], ["check", "models.py:right", "--profile", "quick"]):
        if "NM01" in why and words[0] == "check":
            continue  # the names of faults are those of `mutants`, `list` and `explain`
        ran = veriformer(*words, status=3)
        assert why in ran.stderr
        assert "Traceback" not in ran.stderr
        assert "Error: the plug-in mine (pyproject.toml)" in ran.stderr


def test_a_file_is_no_module(veriformer, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.veriformer]\nplugins = ["mine.py/x"]\n', encoding="utf-8")
    assert "'mine.py/x' is no module; write its dotted name" in veriformer("list", status=3).stderr
