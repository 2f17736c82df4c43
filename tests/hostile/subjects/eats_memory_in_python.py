# expect ERROR: the subject raised MemoryError
from veriformer.properties import Subject


def forward(m, x):
    kept = []
    while True:
        kept.append(bytearray(2**33))


mine = Subject(kind="layer", forward=forward)
