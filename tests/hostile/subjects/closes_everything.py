# expect ERROR: the process ended with status 0 while the subject was judged || the process closed its connection
# expect BLOCKED: given up
import os

from veriformer.properties import Subject


def forward(m, x):
    os.closerange(0, 1024)
    return x * 2


mine = Subject(kind="layer", forward=forward)
