# expect ERROR: on device meta
import torch

from veriformer.properties import Subject

mine = Subject(kind="layer", forward=lambda m, x: torch.empty_like(x, device="meta"))
