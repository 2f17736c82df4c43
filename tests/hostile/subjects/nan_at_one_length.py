# expect FAIL: at length 7 an ordinary input gives NaN
from veriformer.properties import Subject

mine = Subject(
    kind="layer", forward=lambda m, x: x * float("nan") if x.shape[1] == 7 else x * 2, declares={"causal": True}
)
