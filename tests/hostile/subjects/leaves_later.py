# expect PASS|ERROR
import os
import threading
import time

from veriformer.properties import Subject


def later():
    time.sleep(0.05)
    os._exit(0)


threading.Thread(target=later, daemon=True).start()
mine = Subject(kind="layer", forward=lambda m, x: x * 2, declares={"causal": True})
