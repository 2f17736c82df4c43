import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m15_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "15_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

r, w = R.TaggerModel().eval(), W.TaggerModel().eval()
w.load_state_dict(r.state_dict())
src = torch.randint(2, 300, (10, 3))
with torch.no_grad():
    assert torch.allclose(r(src), w(src), atol=1e-6)
    src[6:, 0] = 1
    src[8:, 2] = 1
    short = src[:6, :1]
    assert torch.allclose(r(src)[:6, :1], r(short), atol=1e-5)
    assert (w(src)[:6, :1] - w(short)).abs().max() > 1e-2
    assert torch.allclose(r(src)[:, 1:2], r(src[:, 1:2]), atol=1e-5)
    assert (w(src)[:, 1:2] - w(src[:, 1:2])).abs().max() > 1e-2

print("15 ok")
