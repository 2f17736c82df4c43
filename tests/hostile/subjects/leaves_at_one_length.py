# expect ERROR: the process ended with status 1 while the subject was judged
import os

from veriformer.properties import Subject

mine = Subject(kind="layer", forward=lambda m, x: os._exit(1) if x.shape[1] == 3 else x * 2, declares={"causal": True})
