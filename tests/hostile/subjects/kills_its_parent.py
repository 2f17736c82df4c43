# expect ERROR: while the subject was judged
# expect BLOCKED: given up
import os
import signal

from veriformer.properties import Subject


def forward(m, x):
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()  # a process that dies takes a while to: what went on meanwhile could be right
    return x * 2


mine = Subject(kind="layer", forward=forward)
