# expect only PASS
import signal

from veriformer.properties import Subject


def forward(m, x):
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    return x * 2


mine = Subject(kind="layer", forward=forward, declares={"causal": True})
