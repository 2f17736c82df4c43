# expect ERROR: was ended for starting more than 12 others at a time while the subject was judged
import os
import signal
import time

from veriformer.properties import Subject


def forward(m, x):
    for _ in range(40):  # each is nobody's child, leads a session of its own and listens to no signal
        if not os.fork():
            os.setsid()
            if os.fork():
                os._exit(0)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(30)
            os._exit(0)
    time.sleep(30)
    return x * 2


mine = Subject(kind="layer", forward=forward)
