# expect only PASS
import subprocess
import sys

from veriformer.properties import Subject

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)  # left behind by a hostile subject"])
mine = Subject(kind="layer", forward=lambda m, x: x * 2, declares={"causal": True})
