import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m06_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "06_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

r, w = R.vit_tiny_32().eval(), W.vit_tiny_32().eval()
w.load_state_dict(r.state_dict())
x = torch.randn(2, 3, 32, 32)
y = x.clone(); y[:, :, :8, :8] += 1.0  # only the first patch changes
with torch.no_grad():
    d_r = (r.patch_embed(x) - r.patch_embed(y)).abs().amax(-1)[0]
    d_w = (w.patch_embed(x) - w.patch_embed(y)).abs().amax(-1)[0]
    assert (d_r > 1e-6).nonzero().flatten().tolist() == [0]
    assert (d_w > 1e-6).sum() > 8
    assert (r(x) - w(x)).abs().max() > 1e-3

print("06 ok")
