# expect TIMEOUT: took longer than
# expect BLOCKED: given up
from veriformer.properties import Subject


def build(config):
    while True:
        pass


mine = Subject(kind="layer", build=build)
