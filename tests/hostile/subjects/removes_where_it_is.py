# expect only PASS
import os
import tempfile

from veriformer.properties import Subject

with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
mine = Subject(kind="layer", forward=lambda m, x: x * 2, declares={"causal": True})
