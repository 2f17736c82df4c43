# expect only PASS
# prints: from C
import ctypes
import os

from veriformer.properties import Subject


def forward(m, x):
    os.write(1, b"x" * 200_000)
    os.write(2, b"\xff\xfe\x1b[31m<script>\n")
    ctypes.CDLL(None).puts(b"from C")
    return x * 2


mine = Subject(kind="layer", forward=forward, declares={"causal": True})
