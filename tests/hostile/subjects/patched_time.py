# expect only PASS
import time

from veriformer.properties import Subject


def raises(*args):
    raise RuntimeError("there is no time")


time.perf_counter = time.monotonic = time.process_time = time.sleep = time.time = raises
mine = Subject(kind="layer", forward=lambda m, x: x * 2, declares={"causal": True})
