# expect only PASS
import atexit

from veriformer.properties import Subject


def forever():
    while True:
        pass


atexit.register(forever)
mine = Subject(kind="layer", forward=lambda m, x: x * 2, declares={"causal": True})
