# expect ERROR: the process was ended by SIGSEGV while the subject was judged
import ctypes

from veriformer.properties import Subject

mine = Subject(
    kind="layer", forward=lambda m, x: ctypes.string_at(0) if x.shape[1] == 3 else x * 2, declares={"causal": True}
)
