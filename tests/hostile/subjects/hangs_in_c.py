# expect TIMEOUT: did not react
# expect BLOCKED: given up
import signal
import time

from veriformer.properties import Subject


def forward(m, x):
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(3600)


mine = Subject(kind="layer", forward=forward)
