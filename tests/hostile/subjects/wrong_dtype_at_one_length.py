# expect FAIL|OPEN: at length 7 the output is of float16
from veriformer.properties import Subject

mine = Subject(kind="layer", forward=lambda m, x: x.half() if x.shape[1] == 7 else x * 2, declares={"causal": True})
