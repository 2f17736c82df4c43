# expect ERROR|PASS
import sys

from veriformer.properties import Subject


def forward(m, x):
    sys.modules.clear()
    return x * 2


mine = Subject(kind="layer", forward=forward, declares={"causal": True})
