"""What a subject's file defines is known to the processes that it starts afresh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PARENT = """
import multiprocessing, sys
from pathlib import Path
from veriformer.properties.adapters.homes import home_at
from veriformer.properties.adapters.places import Place
from veriformer.properties.adapters.spawned import announce

announce()
place = Place.of(Path(sys.argv[1]))
with home_at(place.folder).entered(place):
    module = home_at(place.folder).load(place)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply_async(module.told, (module.Number(3),)).get(5), module.__name__)
"""
FILE = """
import {beside}

class Number:
    def __init__(self, value):
        self.value = value

def told(number):
    return [__name__, type(number).__module__, number.value * {beside}.TWO]
"""
FILES = ("my model.py", "types.py", "code/models.py", "below/code/inner/models.py")
"""Those of a package whose name Python has are known by a name of ours, as those in no package are."""


@pytest.mark.parametrize("name", FILES)
def test_a_new_process_knows_the_file_by_its_name_here(tmp_path: Path, name: str) -> None:
    (file := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    beside = file.parent
    while beside.name in ("code", "inner"):
        (beside / "__init__.py").touch()
        beside = beside.parent
    (beside / "tabulate.py").write_text("TWO = 2")  # the name of a library that is installed
    file.write_text(FILE.format(beside="tabulate"))
    words = [sys.executable, "-P", "-c", PARENT, str(file)]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told, own = done.stdout.strip().rsplit(" ", 1)
    assert told == f"['{own}', '{own}', 6]"
    assert own.startswith(("my_model_", "types_", "code_"))
