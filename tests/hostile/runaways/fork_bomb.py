# expect ERROR: was ended for starting more than 12 others at a time while the subject was judged
import os
import time

from veriformer.properties import Subject


def forward(m, x):
    for _ in range(6):  # 64 processes if nobody stops them, which end by themselves
        os.fork()
    time.sleep(30)
    return x * 2


mine = Subject(kind="layer", forward=forward)
