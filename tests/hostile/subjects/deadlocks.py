# expect TIMEOUT: one call of the subject took longer than
# expect BLOCKED: given up
import threading

from veriformer.properties import Subject


def forward(m, x):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


mine = Subject(kind="layer", forward=forward)
