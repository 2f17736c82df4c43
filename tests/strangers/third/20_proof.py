import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m20_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "20_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

r, w = R.MultiQueryAttention(), W.MultiQueryAttention()
w.load_state_dict(r.state_dict())
x = 3 * torch.randn(2, 10, 64)
with torch.no_grad():
    q, k, v = r.Wqkv(x).split([64, 8, 8], 2)
    q = q.view(2, 10, 8, 8).transpose(1, 2)
    m = torch.ones(10, 10).tril() == 0
    dot = q @ k[:, None].transpose(-1, -2)
    ref = lambda s: r.out_proj(((dot * s).masked_fill(m, float("-inf")).softmax(-1) @ v[:, None]).transpose(1, 2).reshape(2, 10, 64))
    assert torch.allclose(r(x), ref(8 ** -0.5), atol=1e-5)
    assert torch.allclose(w(x), ref(1 / 8), atol=1e-5)
    assert (r(x) - w(x)).abs().max() > 1e-2

print("20 ok")
