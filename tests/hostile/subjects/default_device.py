# expect only PASS
import torch

from veriformer.properties import Subject

torch.set_default_device("meta")
mine = Subject(kind="layer", forward=lambda m, x: x * 2, declares={"causal": True})
