# expect ERROR: the subject raised ValueError: aaaa
from veriformer.properties import Subject


def forward(m, x):
    raise ValueError("a" * 10_000_000)


mine = Subject(kind="layer", forward=forward)
