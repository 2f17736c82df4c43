# expect only PASS
import os
import signal
import sys

from veriformer.properties import Subject

DAEMON = "import time; time.sleep(3600)  # left behind by a runaway"


def leave() -> None:
    if os.fork():
        os.wait()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    os.closerange(0, 100)
    os.chdir("/")
    os.execv(sys.executable, [sys.executable, "-c", DAEMON])


leave()
mine = Subject(kind="layer", forward=lambda m, x: x * 2, declares={"causal": True})
