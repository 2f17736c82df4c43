# expect FAIL: the output does not have the shape of its kind: [2, 6, 8] for an input of B=2, T=7
from veriformer.properties import Subject

mine = Subject(
    kind="layer", forward=lambda m, x: x[:, 1:] * 2 if x.shape[1] == 7 else x * 2, declares={"causal": True}
)
