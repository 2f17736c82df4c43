# expect ERROR: the process ended with status 9 while the subject was judged
# expect BLOCKED: given up
# prints: last words
import os

from veriformer.properties import Subject


def forward(m, x):
    os.write(2, b"last words\n")
    os._exit(9)


mine = Subject(kind="layer", forward=forward)
