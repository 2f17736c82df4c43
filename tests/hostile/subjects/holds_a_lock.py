# expect only PASS
import threading

from torch import nn

from veriformer.properties import Subject
from veriformer.properties.subject.sizes import DrawnConfig


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.file = open(__file__)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        with self.lock:
            return self.linear(x)


SIZES = DrawnConfig(d_model=8, num_heads=2)
mine = Subject(kind="layer", config=SIZES, module=Locked(), declares={"causal": True})
