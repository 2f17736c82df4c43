# expect only PASS
import torch
from torch import nn

from veriformer.properties import Subject
from veriformer.properties.subject.sizes import DrawnConfig


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


SIZES = DrawnConfig(d_model=8, num_heads=2)
mine = Subject(kind="layer", config=SIZES, module=torch.jit.trace(Plain(), torch.zeros(2, 3, 8)), declares={"causal": True})
