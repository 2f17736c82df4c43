# expect ERROR: the subject raised Silent: no message
from veriformer.properties import Subject


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


def forward(m, x):
    raise Silent


mine = Subject(kind="layer", forward=forward)
