# expect only PASS
import os
import sys

from veriformer.properties import Subject

sys.stdout.close()
sys.stderr.close()
for descriptor in (0, 1, 2):
    try:
        os.close(descriptor)
    except OSError:
        pass
mine = Subject(kind="layer", forward=lambda m, x: x * 2, declares={"causal": True})
