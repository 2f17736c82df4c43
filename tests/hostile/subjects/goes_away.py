# expect only PASS
import os
import tempfile

from veriformer.properties import Subject

os.chdir(tempfile.gettempdir())
mine = Subject(kind="layer", forward=lambda m, x: os.chdir("/") or x * 2, declares={"causal": True})
