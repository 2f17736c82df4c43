# expect only PASS
import torch

from veriformer.properties import Subject

torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)
torch.set_grad_enabled(False)
torch.set_num_threads(7)
torch.set_flush_denormal(True)
mine = Subject(kind="layer", forward=lambda m, x: x * 2, declares={"causal": True})
