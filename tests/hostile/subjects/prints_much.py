# expect only PASS
# prints: 1 line of Python
import sys

from veriformer.properties import Subject


def forward(m, x):
    print("1 line of Python " + "p" * 100_000)
    sys.stderr.write("e" * 1000 + "\n1 line of Python\n")
    return x * 2


mine = Subject(kind="layer", forward=forward, declares={"causal": True})
