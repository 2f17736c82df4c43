# expect ERROR: the process was ended by SIGABRT while the subject was judged
# expect BLOCKED: given up
import os

from veriformer.properties import Subject

mine = Subject(kind="layer", forward=lambda m, x: os.abort())
