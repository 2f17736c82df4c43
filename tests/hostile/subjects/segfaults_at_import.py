# expect ERROR: the process was ended by SIGSEGV while it was loaded
import ctypes

ctypes.string_at(0)
