# expect TIMEOUT: did not react
# expect BLOCKED: given up
import signal
import time

from veriformer.properties import Subject


def forward(m, x):
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    time.sleep(30)
    return x * 2


mine = Subject(kind="layer", forward=forward)
