"""The example projects, each run in an environment of its own that has the built wheel, not this checkout."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(p.name for p in (ROOT / "examples").iterdir() if p.is_dir() and not p.name.startswith((".", "_")))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment: the wheel unpacked, and links to what else is installed here.

    Left out are veriformer itself, so that nothing of the checkout is found, and torchvision, whose compiled part does
    not load beside a CPU build of torch.
    """
    folder = tmp_path_factory.mktemp("scratch") / "venv"
    venv.create(folder, with_pip=False)
    (inside,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(inside)
    for installed in map(Path, site.getsitepackages()):
        for entry in installed.iterdir():
            if "veriformer" not in entry.name and not entry.name.startswith(("torchvision", "timm", "__pycache__")):
                target = inside / entry.name
                if not target.exists() and entry.suffix != ".pth":
                    target.symlink_to(entry)
    return folder / "bin" / "python"


def in_project(python: Path, project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *arguments], cwd=project, capture_output=True, text=True, check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PYTHON", "COV"))},
    )  # fmt: skip


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples" / request.param, tmp_path / "project")
    return tmp_path / "project"


@pytest.mark.parametrize("project", EXAMPLES, indirect=True)
def test_an_example_passes_its_own_tests(python: Path, project: Path) -> None:
    found = in_project(python, project, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-2000:]
    assert " passed" in found.stdout
    where = in_project(python, project, "-c", "import veriformer.properties as p; print(p.__file__)")
    assert str(ROOT) not in where.stdout


BROKEN = {
    "gpt": ("gpt.py", "is_causal=True", "is_causal=False"),
    "finetuned": ("model.py", "(states * real).sum(1) / real.sum(1).clamp(min=1)", "states.mean(1)"),
    "kernel": ("kernel.py", "return wrong @ k, wrong.transpose", "return 1.1 * (wrong @ k), wrong.transpose"),
    "jax_module": ("block.py", "mask=past)", "mask=None)"),
    "deviations": ("deviations.toml", 'property = "padding.pooling"', 'property = "padding.mask-matters"'),
}


@pytest.mark.parametrize("project", [e for e in EXAMPLES if e in BROKEN], indirect=True)
def test_a_broken_copy_of_an_example_fails(python: Path, project: Path, request: pytest.FixtureRequest) -> None:
    file, right, wrong = BROKEN[request.node.callspec.params["project"]]
    text = (project / file).read_text()
    assert right in text
    (project / file).write_text(text.replace(right, wrong))
    found = in_project(python, project, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert found.returncode == 1, found.stdout[-3000:]
    assert " failed" in found.stdout


def test_every_example_has_a_broken_copy() -> None:
    assert set(BROKEN) == set(EXAMPLES), sys.version
