import torch
from torch import nn

DEFAULTS = {"width": 24, "depth": 2, "dropout": 0.0, "bias": True}


class Net(nn.Module):
    """A configurable stack. Takes any of DEFAULTS."""

    def __init__(self, **config):
        super().__init__()
        cfg = {**config, **DEFAULTS}
        w = cfg["width"]
        self.first = nn.Linear(8, w)
        self.hidden = nn.ModuleList(nn.Linear(w, w, bias=cfg["bias"]) for _ in range(cfg["depth"]))
        self.drop = nn.Dropout(cfg["dropout"])
        self.last = nn.Linear(w, 4)

    def forward(self, x):
        x = torch.relu(self.first(x))
        for layer in self.hidden:
            x = x + self.drop(torch.relu(layer(x)))
        return self.last(x)
