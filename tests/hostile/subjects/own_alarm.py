# expect only PASS
import signal

from veriformer.properties import Subject


def forward(m, x):
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    return x * 2


signal.signal(signal.SIGALRM, lambda number, frame: None)
mine = Subject(kind="layer", forward=forward, declares={"causal": True})
