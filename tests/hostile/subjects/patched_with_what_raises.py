# expect ERROR: looking at the subject raised RuntimeError: not today (patched_with_what_raises.py, line 8)
import torch

from veriformer.properties import Subject


def raises(*args, **kwargs):
    raise RuntimeError("not today")


torch.Tensor.isfinite = torch.Tensor.equal = torch.equal = raises
mine = Subject(kind="layer", forward=lambda m, x: x * 2, declares={"causal": True})
