# expect ERROR: while the subject was judged
import os
import signal
import time

from daemon import leave

from veriformer.properties import Subject


def forward(m, x):
    leave()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3)
    return x * 2


mine = Subject(kind="layer", forward=forward)
