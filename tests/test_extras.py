"""What a check does not need is not needed to check; who needs it is told what to install."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from veriformer.cli.extras import EXTRAS, insist_on
from veriformer.cli.main import main

ROOT = Path(__file__).parent.parent
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CLUSTER = ("distributed", "submitit")
BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Nowhere(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Nowhere())
"""


BEGIN = """
import sys
assert type(sys.meta_path[0]).__name__ == "Nowhere", "nothing is blocked"
from veriformer.cli.main import main
main()
"""


def test_a_check_needs_none_of_the_extras(tmp_path: Path) -> None:
    """In this process and in those that judge: all of them read the file that blocks what extras hold."""
    names = {*EXTRAS["ablate"], *CLUSTER, "transformers", "timm", "jax", "flax", "x_transformers"}
    (tmp_path / "sitecustomize.py").write_text(BLOCKED.format(names=names), encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", BEGIN, "check", "torch:LayerNorm",
               "--only", "norm.definition", "--profile", "quick", "--out", "report"]  # fmt: skip
    ran = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 pass of 1 applicable" in ran.stdout
    assert (tmp_path / "report" / "report.html").is_file()


@pytest.mark.parametrize("words", [["ablate", "positions"], ["claims", "13"]])
def test_who_needs_an_extra_says_what_to_install(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 3
    told = capsys.readouterr().err
    assert f"Error: veriformer {words[0]} needs matplotlib, which is not installed" in told
    assert "pip install 'veriformer[ablate]'" in told


def test_several_missing_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EXTRAS["ablate"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(click.UsageError, match="needs matplotlib and pebble, which are not installed"):
        insist_on("ablate", "it")


def test_extras_are_what_pyproject_says_and_the_readme_installs_all() -> None:
    extras = TABLE["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        assert {re.split(r"\W", line)[0] for line in extras[extra]} == set(modules)
        assert extra in re.search(r"veriformer\[([\w,-]+)\]", extras["dev"][0])[1].split(",")  # type: ignore[index]


HEAVY = ("matplotlib", "pebble", "tomlkit", "jinja2", "pandas", "jsonschema")
AT_IMPORT = {
    "matplotlib": ("reports/",), "pandas": ("reports/",), "jsonschema": ("reports/",),
    "tomlkit": ("properties/known/editing.py",),
}  # fmt: skip
"""Where each is imported at the top of a file; elsewhere in functions alone."""


def test_what_is_heavy_is_imported_where_it_is_used() -> None:
    folders = ("ablations", "claims", "cli", "clusters", "properties", "reports")
    for path in [p for folder in folders for p in (ROOT / folder).rglob("*.py")]:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in body if isinstance(node, ast.ImportFrom)]
        for top in {name.partition(".")[0] for name in names} & set(HEAVY):
            place = str(path.relative_to(ROOT))
            assert place.startswith(AT_IMPORT.get(top, ())), f"{place} imports {top} at its top"
