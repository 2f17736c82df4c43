# expect ERROR: cannot be moved
from torch import nn

from veriformer.properties import Subject


class Fixed(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.linear = nn.Linear(d, d)

    def to(self, *args, **kwargs):
        raise RuntimeError("I stay here")

    def forward(self, x):
        return self.linear(x)


mine = Subject(kind="layer", build=lambda c: Fixed(c.d_model), declares={"causal": True})
