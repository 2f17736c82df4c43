# expect only PASS
import torch

from veriformer.properties import Subject


def forward(m, x):
    torch.set_default_device("meta")
    return x * 2


mine = Subject(kind="layer", forward=forward, declares={"causal": True})
