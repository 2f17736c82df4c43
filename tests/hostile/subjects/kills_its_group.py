# expect ERROR: the process was ended by SIGKILL
# expect BLOCKED: given up
import os
import signal

from veriformer.properties import Subject

mine = Subject(kind="layer", forward=lambda m, x: os.kill(0, signal.SIGKILL))
