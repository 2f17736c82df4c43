# expect FAIL|ERROR|VACUOUS|PASS
import torch

from veriformer.properties import Subject

torch.Tensor.__sub__ = torch.Tensor.__add__
mine = Subject(kind="layer", forward=lambda m, x: x * 2, declares={"causal": True})
