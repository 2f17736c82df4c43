# expect ERROR: while the subject was judged
import os
import signal
import time

from veriformer.properties import Subject


def head(lives):
    """Have a successor for as long as there are lives; it waits for its parent to be killed."""
    for _ in range(lives):
        parent = os.getpid()
        if os.fork():
            os.setpgid(0, 0)
            time.sleep(30)
            os._exit(0)
        while os.getppid() == parent:
            time.sleep(0.001)


def forward(m, x):
    if not os.fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        head(30)
        os._exit(0)
    time.sleep(0.1)
    os._exit(9)


mine = Subject(kind="layer", forward=forward)
