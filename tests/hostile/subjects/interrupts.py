# expect ERROR: the subject raised KeyboardInterrupt
from veriformer.properties import Subject


def forward(m, x):
    raise KeyboardInterrupt


mine = Subject(kind="layer", forward=forward)
