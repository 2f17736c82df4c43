# expect TIMEOUT: did not react
# expect BLOCKED: given up
import signal

from veriformer.properties import Subject


def forward(m, x):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True:
        pass


mine = Subject(kind="layer", forward=forward)
