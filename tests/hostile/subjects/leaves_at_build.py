# expect ERROR: the process ended with status 6 while the subject was judged
# expect BLOCKED: given up
import os

from veriformer.properties import Subject

mine = Subject(kind="layer", build=lambda c: os._exit(6))
