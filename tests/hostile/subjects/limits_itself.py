# expect ERROR: the process was ended by SIGXCPU
# expect BLOCKED: given up
import resource

from veriformer.properties import Subject


def forward(m, x):
    resource.setrlimit(resource.RLIMIT_CPU, (0, 1))
    while True:
        pass


mine = Subject(kind="layer", forward=forward)
