# expect only PASS
import random

import numpy as np
import torch

from veriformer.properties import Subject


def forward(m, x):
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    return x * 2


mine = Subject(kind="layer", forward=forward, declares={"causal": True})
