# expect ERROR: the process ended with status 4 while the subject was judged
# expect BLOCKED: given up
import os

from veriformer.properties import Subject

mine = Subject(kind="layer", forward=lambda m, x: os._exit(4))
