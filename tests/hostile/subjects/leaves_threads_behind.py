# expect only PASS
import threading
import time

from veriformer.properties import Subject


def forward(m, x):
    if threading.active_count() < 20:
        threading.Thread(target=time.sleep, args=(3600,)).start()
    return x * 2


mine = Subject(kind="layer", forward=forward, declares={"causal": True})
