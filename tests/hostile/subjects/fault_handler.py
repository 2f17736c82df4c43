# expect ERROR: the process was ended by SIGSEGV
# expect BLOCKED: given up
# prints: Fatal Python error: Segmentation fault
import ctypes
import faulthandler

from veriformer.properties import Subject

faulthandler.enable(file=2)
mine = Subject(kind="layer", forward=lambda m, x: ctypes.string_at(0))
