import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m22_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "22_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

A, B = R.T5RelativeAttention, W.T5RelativeAttention
rel = torch.arange(-100, 101)
b_r, b_w = A._relative_position_bucket(rel), B._relative_position_bucket(rel)
assert b_r.unique().numel() > b_w.unique().numel() + 8
assert b_w[rel <= -8].unique().numel() == 1 and b_r[rel <= -8].unique().numel() > 5
r, w = A().eval(), B().eval()
w.load_state_dict(r.state_dict())
x = torch.randn(2, 60, 64)
with torch.no_grad():
    assert torch.allclose(r(x[:, :8]), w(x[:, :8]), atol=1e-5)
    assert (r(x) - w(x)).abs().max() > 1e-2
    long = torch.randn(1, 300, 64)
    r(long)
    try:
        w(long)
    except IndexError:
        pass
    else:
        raise AssertionError("expected an index error")

print("22 ok")
