# expect ERROR: File too large || was ended for writing more than 0.02 GiB
from veriformer.properties import Subject


def forward(m, x):
    with open("large.left", "wb") as file:
        for _ in range(64):
            file.write(bytes(2**20))
    return x * 2


mine = Subject(kind="layer", forward=forward)
