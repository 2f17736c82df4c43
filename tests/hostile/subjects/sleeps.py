# expect TIMEOUT: one call of the subject took longer than
# expect BLOCKED: given up
import time

from veriformer.properties import Subject


def forward(m, x):
    time.sleep(3600)


mine = Subject(kind="layer", forward=forward)
