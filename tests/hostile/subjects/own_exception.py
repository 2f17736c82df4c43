# expect ERROR: the subject raised Stop: enough
from veriformer.properties import Subject


class Stop(BaseException):
    pass


def forward(m, x):
    raise Stop("enough")


mine = Subject(kind="layer", forward=forward)
