# expect ERROR: was ended for writing more than 0.02 GiB, with all that it started, while the subject was judged
import time

from veriformer.properties import Subject


def forward(m, x):
    for _ in range(100):
        with open("small.left", "wb") as file:
            file.write(bytes(2**20))
    time.sleep(0.2)
    return x * 2


mine = Subject(kind="layer", forward=forward)
