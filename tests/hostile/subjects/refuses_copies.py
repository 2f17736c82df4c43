# expect PASS
from torch import nn

from veriformer.properties import Subject
from veriformer.properties.subject.sizes import DrawnConfig


class Single(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def __deepcopy__(self, memo):
        raise TypeError("there is but one of me")

    def __reduce_ex__(self, protocol):
        raise TypeError("there is but one of me")

    def state_dict(self, *args, **kwargs):
        raise TypeError("nobody reads my state")

    def forward(self, x):
        return self.linear(x)


SIZES = DrawnConfig(d_model=8, num_heads=2)
mine = Subject(kind="layer", config=SIZES, module=Single(), declares={"causal": True})
