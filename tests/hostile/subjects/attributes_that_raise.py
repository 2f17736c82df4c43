# expect ERROR|PASS
from torch import nn

from veriformer.properties import Subject
from veriformer.properties.subject.sizes import DrawnConfig


class Closed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def __getattr__(self, name):
        if name == "linear":
            return super().__getattr__(name)
        raise RuntimeError(f"{name} is not for you")

    def forward(self, x):
        return self.linear(x)


SIZES = DrawnConfig(d_model=8, num_heads=2)
mine = Subject(kind="layer", config=SIZES, module=Closed(), declares={"causal": True})
