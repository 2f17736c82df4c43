# expect FAIL: the output does not have the shape of its kind: [19, 2, 8] for an input of B=2, T=19
from veriformer.properties import Subject

mine = Subject(
    kind="layer", forward=lambda m, x: x.transpose(0, 1) * 2 if x.shape[1] == 19 else x * 2, declares={"causal": True}
)
