# expect FAIL: at length 7 forward returned None
from veriformer.properties import Subject

mine = Subject(kind="layer", forward=lambda m, x: None if x.shape[1] == 7 else x * 2, declares={"causal": True})
