# expect TIMEOUT: one call of the subject took longer than
# expect BLOCKED: given up
from veriformer.properties import Subject


def forward(m, x):
    while True:
        pass


mine = Subject(kind="layer", forward=forward)
