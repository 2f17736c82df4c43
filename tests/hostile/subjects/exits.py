# expect ERROR: the subject raised SystemExit: 3
import sys

from veriformer.properties import Subject

mine = Subject(kind="layer", forward=lambda m, x: sys.exit(3))
