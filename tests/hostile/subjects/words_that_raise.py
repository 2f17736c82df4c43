# expect only PASS
from torch import nn

from veriformer.properties import Subject
from veriformer.properties.subject.sizes import DrawnConfig


class Mute(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def __str__(self):
        raise RuntimeError("no words")

    def __len__(self):
        raise RuntimeError("no length")

    def __bool__(self):
        raise RuntimeError("neither true nor false")

    def __eq__(self, other):
        raise RuntimeError("like nothing else")

    __repr__ = __str__
    __hash__ = nn.Module.__hash__

    def forward(self, x):
        return self.linear(x)


SIZES = DrawnConfig(d_model=8, num_heads=2)
mine = Subject(kind="layer", config=SIZES, module=Mute(), declares={"causal": True})
