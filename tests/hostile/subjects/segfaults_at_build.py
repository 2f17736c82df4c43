# expect ERROR: the process was ended by SIGSEGV while the subject was judged
# expect BLOCKED: given up
import ctypes

from veriformer.properties import Subject

mine = Subject(kind="layer", build=lambda c: ctypes.string_at(0))
