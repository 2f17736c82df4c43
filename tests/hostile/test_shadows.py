"""A file that has the name of a module is named in one sentence where it breaks an import, and harms nobody else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from veriformer.properties.adapters.plugins import Plugin, PluginError
from veriformer.properties.adapters.shadows import shadow
from veriformer.properties.adapters.target import TargetError
from veriformer.properties.bench.guards import SubjectError, guarded
from veriformer.properties.extending import load as load_plugins
from veriformer.properties.targets import load

PYTHON, LIBRARY = "which is imported instead; rename the file", "is imported instead of the installed library's own"
CASES = {
    "python's, a name that it lacks": ("queue", "from queue import Ring", "Python's own 'queue', " + PYTHON),
    "python's, an attribute": ("random", "import random\nrandom.mine()", "Python's own 'random', " + PYTHON),
    "python's, a module below": ("email", "import email.rings", "Python's own 'email', " + PYTHON),
    "torch's, imported before": ("torch", "from torch.rings import Ring", "library's own 'torch', " + PYTHON),
    "a library's, that lacks a name": ("rings", "from rings import Ring", LIBRARY + " 'rings'; rename"),
    "a library's, that is no package": ("rings", "import rings.models", LIBRARY + " 'rings'; rename"),
    "a library's, that another needs": ("rings", "import needs_rings", LIBRARY + " 'rings'; rename"),
    "a library's, whose user says less": ("rings", "import hides_its_cause", LIBRARY + " 'rings'; rename"),
    "a library's, in a factory": ("rings", "def made():\n    from rings import Ring", LIBRARY + " 'rings'; rename"),
    "a library's, as a folder": ("rings/__init__", "from rings import Ring", "rings/__init__.py is imported instead"),
}


@pytest.fixture(autouse=True)
def _libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (installed := tmp_path / "site-packages").mkdir()
    (installed / "rings.py").write_text("class Ring: ...\n")
    (installed / "needs_rings.py").write_text("from rings import Ring\n")
    (installed / "hides_its_cause.py").write_text(
        "import rings\nif not hasattr(rings, 'Ring'):\n    raise ImportError('Ring is not there')\n"
    )
    monkeypatch.syspath_prepend(str(installed))
    for name in ("rings", "needs_rings", "hides_its_cause"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("case", CASES)
def test_it_is_named(tmp_path: Path, case: str) -> None:
    name, imports, said = CASES[case]
    (file := tmp_path / "home" / f"{name}.py").parent.mkdir(parents=True)
    file.touch()
    (tmp_path / "home" / "model.py").write_text(imports)
    with pytest.raises(TargetError) as told:
        load("home/model.py:made", tmp_path)
    assert said in str(told.value), told.value
    assert f"home/{name}.py" in str(told.value)


@pytest.mark.parametrize("imports", ["import no_such_rings", "from queue import Ring", "None.rings", "import beside"])
def test_none_is_named_where_none_is_in_the_way(tmp_path: Path, imports: str) -> None:
    (tmp_path / "beside.py").write_text("raise ImportError('its own')")
    (tmp_path / "model.py").write_text(imports)
    with pytest.raises(TargetError) as told:
        load("model.py:made", tmp_path)
    assert "rename" not in str(told.value), told.value


def test_it_is_named_where_a_call_meets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "queue.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.path.append(sys.path.pop(0))  # behind Python's own, as beside a target

    def forward() -> None:
        from queue import Ring  # type: ignore[attr-defined]  # noqa: F401

    with pytest.raises(SubjectError, match=r"queue.py has the name of Python's own 'queue'"):
        guarded(forward, (), {}, 5.0)


def test_a_circle_of_causes_ends() -> None:
    one, other = ImportError("one"), ImportError("other")
    one.__cause__, other.__cause__ = other, one
    assert shadow(one) == ""


def test_a_plugin_hides_nothing_of_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sched", "shadowing_plugin"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    (tmp_path / "sched.py").write_text("raise RuntimeError('mine')")
    (tmp_path / "shadowing_plugin.py").write_text("import sched\nsched.rings")
    with pytest.raises(PluginError, match=r"no attribute 'rings'.*sched.py has the name of Python's own 'sched'"):
        load_plugins([Plugin("shadowing", "shadowing_plugin", "pyproject.toml", str(tmp_path))])
