import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m08_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "08_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

r, w = R.MaskedSelfAttention().eval(), W.MaskedSelfAttention().eval()
w.load_state_dict(r.state_dict())
x = torch.randn(2, 12, 32)
y = x.clone(); y[:, 8:] = torch.randn(2, 4, 32)
with torch.no_grad():
    assert torch.allclose(r(x)[:, :8], r(y)[:, :8], atol=1e-6)
    assert (w(x)[:, :8] - w(y)[:, :8]).abs().max() > 1e-2
    assert (r(x) - w(x)).abs().max() > 1e-2

print("08 ok")
