# expect TIMEOUT: did not react
# expect BLOCKED: given up
import os
import signal
import time

from veriformer.properties import Subject


def forward(m, x):
    os.kill(os.getppid(), signal.SIGSTOP)
    while True:
        try:
            time.sleep(30)
        except BaseException:
            pass


mine = Subject(kind="layer", forward=forward)
