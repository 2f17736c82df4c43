# expect FAIL: at length 3 alone the subject raised SystemExit: 1
import sys

from veriformer.properties import Subject

mine = Subject(kind="layer", forward=lambda m, x: sys.exit(1) if x.shape[1] == 3 else x * 2, declares={"causal": True})
