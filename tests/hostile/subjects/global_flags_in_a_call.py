# expect only PASS
import torch

from veriformer.properties import Subject


def forward(m, x):
    torch.set_default_dtype(torch.float16)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.set_num_threads(5)
    torch.manual_seed(0)
    return x * 2


mine = Subject(kind="layer", forward=forward, declares={"causal": True})
