# expect ERROR: was ended for filling more than 1.2 GiB of memory, with all that it started,
import os
import time

from veriformer.properties import Subject


def forward(m, x):
    for _ in range(10):
        if not os.fork():
            kept = bytearray(b"x") * (130 * 2**20)  # none of them is too large for itself
            time.sleep(20)
            os._exit(len(kept) == 0)
    time.sleep(20)
    return x * 2


mine = Subject(kind="layer", forward=forward)
