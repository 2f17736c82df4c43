"""The example projects, each run in an environment of its own that has the built wheel, not this checkout."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(p.name for p in (ROOT / "examples").iterdir() if p.is_dir() and not p.name.startswith((".", "_")))


def environment(folder: Path, wheel: Path) -> Path:
    """Make an environment and return its Python: the wheel unpacked, and links to what else is installed here.

    Left out are veriformer itself, so that nothing of the checkout is found, and torchvision, whose compiled part does
    not load beside a CPU build of torch.
    """
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


def run(folder: Path, wheel: Path) -> None:
    """Run the tests of every example as it is, and of its broken copy, each by itself; leave what they print."""
    for name, (file, right, wrong) in BROKEN.items():
        shutil.copytree(ROOT / "examples" / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        broken = shutil.copytree(folder / name, folder / f"{name} broken") / file
        text = broken.read_text(encoding="utf-8")
        assert right in text
        broken.write_text(text.replace(right, wrong), encoding="utf-8")
    projects = sorted(str(p) for p in folder.iterdir())
    python = environment(folder / "venv", wheel)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PYTHON", "COV"))}
    subprocess.run([python, "-c", ONE_AFTER_ANOTHER, *projects], cwd=folder, env=kept, check=True)


ONE_AFTER_ANOTHER = """
import os, sys
import flax.linen, pytest, torch._dynamo, transformers.models.bert.modeling_bert
import veriformer.properties.parametrizing
from veriformer.properties.adapters.recognising import shipped
from veriformer.properties.judging.catalogue import catalogue

catalogue(), shipped("reference")

for project in sys.argv[1:]:
    if not (child := os.fork()):
        os.chdir(project)
        seen = os.open("output.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(seen, 1)
        os.dup2(seen, 2)
        status = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider"]))
        print(f"{veriformer.properties.__file__}\\nstatus {status}", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, project
"""
"""Runs each project in a copy of a process that has imported what they are made of."""


BROKEN = {
    "gpt": ("gpt.py", "is_causal=True", "is_causal=False"),
    "finetuned": ("model.py", "(states * real).sum(1) / real.sum(1).clamp(min=1)", "states.mean(1)"),
    "kernel": ("kernel.py", "return wrong @ k, wrong.transpose", "return 1.1 * (wrong @ k), wrong.transpose"),
    "jax_module": ("block.py", "mask=past)", "mask=None)"),
    "plugin": ("house_norms/norm.py", "wide - wide.mean(-1, keepdim=True)", "wide - wide.mean()"),
    "deviations": ("deviations.toml", 'property = "padding.pooling"', 'property = "padding.mask-matters"'),
}


def test_examples_pass_their_own_tests_and_their_broken_copies_do_not(tmp_path: Path, wheel: Path) -> None:
    run(tmp_path, wheel)
    wrong = []
    for example in EXAMPLES:
        for copy, wanted, word in ((example, 0, " passed"), (f"{example} broken", 1, " failed")):
            *seen, place, status = (tmp_path / copy / "output.txt").read_text(encoding="utf-8").splitlines()
            assert Path(place).is_relative_to(tmp_path / "venv"), "not the wheel was tested"
            if status != f"status {wanted}" or word not in seen[-1]:
                wrong.append("\n".join([f"{copy}: {status}, wanted {wanted}", *seen]))
    assert not wrong, "\n\n".join(wrong)


def test_every_example_has_a_broken_copy() -> None:
    assert set(BROKEN) == set(EXAMPLES)
