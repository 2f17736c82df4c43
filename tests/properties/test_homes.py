"""Targets of several folders in one process: each imports what lies beside it, and leaves the rest as it was."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest

from veriformer.properties import check
from veriformer.properties.adapters.places import Place
from veriformer.properties.adapters.target import TargetError
from veriformer.properties.targets import at_home, load


@pytest.fixture(autouse=True)
def _nobody_has_a_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the `helper` that a test imports by itself: whichever test of a worker comes next finds it otherwise."""
    monkeypatch.setitem(sys.modules, "helper", ModuleType("helper"))
    monkeypatch.delitem(sys.modules, "helper")


HELPER = "AXIS = {axis}\n\n\nclass Kept:\n    pass\n"
SUBJECT = """
from veriformer.properties import Subject


def forward(model, scores, dim=-1):
    {late}
    return scores.softmax(dim if AXIS else 0)


mine = Subject(kind="softmax", forward=forward)
"""
FORMS = {
    "at the top": (f"from helper import AXIS\n{SUBJECT.format(late='pass')}", "helper.py"),
    "late": (SUBJECT.format(late="from helper import AXIS"), "helper.py"),
    "late, by name": (
        SUBJECT.format(late="AXIS = __import__('importlib').import_module('helper').AXIS"), "helper.py",
    ),
    "a package": (f"from parts.inner.helper import AXIS\n{SUBJECT.format(late='pass')}", "parts/inner/helper.py"),
    "a late package": (SUBJECT.format(late="from parts.inner.helper import AXIS"), "parts/inner/helper.py"),
    "from a folder that it names": (
        "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parent / 'lib'))\n"
        + SUBJECT.format(late="from helper import AXIS"), "lib/helper.py",
    ),
}  # fmt: skip


def project(folder: Path, axis: int, form: str = "at the top", *, is_package: bool = True) -> Path:
    """Write a subject whose helper says whether it heeds the axis that it is asked for."""
    model, helper = FORMS[form]
    (folder / helper).parent.mkdir(parents=True)
    (folder / helper).write_text(HELPER.format(axis=axis), encoding="utf-8")
    for parent in (folder / helper).relative_to(folder).parents if is_package else ():
        if parent != Path() and form != "from a folder that it names":
            (folder / parent / "__init__.py").touch()
    (folder / "model.py").write_text(model, encoding="utf-8")
    return folder / "model.py"


def judged(*paths: Path) -> list[bool]:
    """Load all, then judge all, in this process."""
    subjects = [load(f"{path}:mine")[0] for path in paths]
    return [check(s, only=["softmax.axis"], profile="quick").ok for s in subjects]


@pytest.mark.parametrize("is_package", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_each_has_the_helper_beside_it(form: str, is_package: bool, tmp_path: Path) -> None:
    right = project(tmp_path / "right", 1, form, is_package=is_package)
    wrong = project(tmp_path / "wrong", 0, form, is_package=is_package)
    path, finders = sys.path[:], sys.meta_path[:]
    assert judged(right, wrong, right) == [True, False, True]
    assert (sys.path, sys.meta_path) == (path, finders)


def test_what_one_has_and_another_lacks_is_lacking(tmp_path: Path) -> None:
    first, second = project(tmp_path / "first", 1), project(tmp_path / "second", 1)
    (second.parent / "helper.py").unlink()
    load(f"{first}:mine")
    with pytest.raises(TargetError, match="ModuleNotFoundError: No module named 'helper'"):
        load(f"{second}:mine")


def test_what_was_imported_before_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helper.py").write_text(HELPER.format(axis=1), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = importlib.import_module("helper")
    assert judged(project(tmp_path / "wrong", 0)) == [False]
    assert sys.modules["helper"] is before
    assert isinstance(pickle.loads(pickle.dumps(before.Kept())), before.Kept)


def test_the_same_file_is_shared_with_who_imported_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project(tmp_path / "mine", 1)
    monkeypatch.syspath_prepend(str(path.parent))
    before = importlib.import_module("helper")
    (subject,) = load(f"{path}:mine")
    with at_home(subject.target):
        assert sys.modules["helper"] is before


def test_objects_can_be_pickled_at_home(tmp_path: Path) -> None:
    paths = [project(tmp_path / name, 1) for name in ("one", "two")]
    for path in paths:
        path.write_text(path.read_text(encoding="utf-8") + "\nfrom helper import Kept\n", encoding="utf-8")
    kept = {s.target: s.forward.__globals__["Kept"] for p in paths for s in load(f"{p}:mine") if s.forward}
    first, second = kept.values()
    assert first is not second
    for target, cls in kept.items():
        with at_home(target):
            assert isinstance(pickle.loads(pickle.dumps(cls())), cls)


def test_libraries_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("helper")
    library.__file__ = str(Path(pytest.__file__).parent.parent / "helper.py")
    monkeypatch.setitem(sys.modules, "helper", library)
    library.AXIS = 1  # type: ignore[attr-defined]
    assert judged(project(tmp_path / "wrong", 0)) == [True]


@pytest.mark.parametrize("name", ["types", "random", "torch", "tokenize", "colorsys", "tabulate"])
def test_a_file_may_have_the_name_of_a_library(name: str, tmp_path: Path) -> None:
    path = project(tmp_path / "mine", 1)
    named = path.rename(path.with_name(f"{name}.py"))
    named.write_text(f"import {name} as other\n" + named.read_text(encoding="utf-8"), encoding="utf-8")
    (subject,) = load(f"{named}:mine")
    assert subject.forward is not None
    assert subject.forward.__globals__["other"] is sys.modules[name]
    assert "mine" not in vars(sys.modules[name])


@pytest.mark.parametrize("top", ["ours", "code", "torch"])
@pytest.mark.parametrize("file", ["layers/mine.py", "layers/__init__.py", "__init__.py"])
def test_a_path_into_a_package_is_loaded_as_part_of_it(file: str, top: str, tmp_path: Path) -> None:
    package = tmp_path / top
    (package / "layers").mkdir(parents=True)
    for name in ("__init__.py", "layers/__init__.py"):
        (package / name).touch()
    (package / "helper.py").write_text(HELPER.format(axis=1), encoding="utf-8")
    dots = "." if file == "__init__.py" else ".."
    text = f"from {dots}helper import AXIS\n{SUBJECT.format(late=f'from {dots}helper import Kept')}"
    (package / file).write_text(text, encoding="utf-8")
    assert judged(package / file) == [True]
    (subject,) = load(f"{package / file}:mine")
    name = Place.of(package / file).name
    assert subject.forward is not None
    assert (subject.forward.__module__ == name) == (top == "ours")


def test_a_module_and_a_path_to_it_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path / "apart", 1)
    (tmp_path / "apart" / "__init__.py").touch()
    (tmp_path / "apart" / "model.py").write_text(
        "from apart.helper import AXIS\n" + SUBJECT.format(late="pass"), encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    (by_path,), (by_name,) = load("apart/model.py:mine"), load("apart.model:mine")
    assert by_path.forward is by_name.forward


def test_a_file_that_ends_the_process_is_named(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(5)\n", encoding="utf-8")
    with pytest.raises(TargetError, match=r"ends\.py' cannot be imported: SystemExit: 5 \(ends\.py, line 2\)"):
        load(f"{tmp_path}/ends.py:mine")


def test_a_folder_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "models.py").mkdir()
    with pytest.raises(TargetError, match=r"models\.py' is a folder; give the path of a Python file"):
        load(f"{tmp_path}/models.py:mine")
