# expect ERROR: the subject raised
import torch

from veriformer.properties import Subject

mine = Subject(kind="layer", forward=lambda m, x: torch.zeros(2**40) + x.sum())
