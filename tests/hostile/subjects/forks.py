# expect only PASS
import os

from veriformer.properties import Subject

began = []


def forward(m, x):
    if not began:
        began.append(os.getpid())
        os.fork()  # from here on two processes answer
    return x * 2


mine = Subject(kind="layer", forward=forward, declares={"causal": True})
