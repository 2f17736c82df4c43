# expect TIMEOUT: did not react
# expect BLOCKED: given up
import gc

from veriformer.properties import Subject


def endless(phase, info):
    while True:
        pass


def forward(m, x):
    gc.callbacks.append(endless)
    gc.collect()
    return x * 2


mine = Subject(kind="layer", forward=forward)
