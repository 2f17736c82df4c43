# expect TIMEOUT: did not react
# expect BLOCKED: given up
import os
import signal

from veriformer.properties import Subject

mine = Subject(kind="layer", forward=lambda m, x: os.kill(os.getpid(), signal.SIGSTOP))
