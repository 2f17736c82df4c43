import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m09_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "09_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

r, w = R.RotaryEmbedding(16), W.RotaryEmbedding(16)
q, k = torch.randn(2, 1, 2, 1, 16).expand(2, 1, 2, 40, 16).unbind(0)


def scores(m):
    a, b = m(q, k)
    return a @ b.transpose(-1, -2), a


s_r, q_r = scores(r)
s_w, q_w = scores(w)
# same content everywhere: score depends on the distance alone
assert torch.allclose(s_r[..., 5, 2], s_r[..., 35, 32], atol=1e-4)
assert (s_w[..., 5, 2] - s_w[..., 35, 32]).abs().max() > 1e-1
assert torch.allclose(q_r.norm(dim=-1), q.norm(dim=-1), atol=1e-4)
assert (q_w.norm(dim=-1) - q.norm(dim=-1)).abs().max() > 1e-1

print("09 ok")
