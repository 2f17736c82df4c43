# expect ERROR|TIMEOUT: the subject
from veriformer.properties import Subject


def forward(m, x):
    return forward(m, x)


mine = Subject(kind="layer", forward=forward)
