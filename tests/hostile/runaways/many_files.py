# expect ERROR: Too many open files
import os

from veriformer.properties import Subject

opened = []


def forward(m, x):
    opened.extend(os.open(f"{number % 10}.left", os.O_CREAT | os.O_RDWR) for number in range(2000))
    return x * 2


mine = Subject(kind="layer", forward=forward)
