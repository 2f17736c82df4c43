# expect ERROR: build raised SystemExit: 5
import sys

from veriformer.properties import Subject

mine = Subject(kind="layer", build=lambda c: sys.exit(5))
