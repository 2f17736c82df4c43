# expect only PASS
from veriformer.properties import Subject

mine = Subject(
    kind="layer", name="<img src=x> \x1b[31m \ud800 [bold]", forward=lambda m, x: x * 2, declares={"causal": True}
)
