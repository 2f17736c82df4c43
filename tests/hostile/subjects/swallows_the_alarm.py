# expect TIMEOUT: did not react
# expect BLOCKED: given up
from veriformer.properties import Subject


def forward(m, x):
    while True:
        try:
            while True:
                pass
        except:  # noqa: E722
            pass


mine = Subject(kind="layer", forward=forward)
