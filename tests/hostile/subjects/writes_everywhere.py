# expect ERROR: the process sent what is no answer while the subject was judged
# expect BLOCKED: given up
import os

from veriformer.properties import Subject


def forward(m, x):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\x00\x01garbage\n{}\n[1]\nnull\n" * 10)
        except OSError:
            pass
    return x * 2


mine = Subject(kind="layer", forward=forward)
