import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m13_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "13_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
mask = torch.ones(6, 6).tril()
ref = F.scaled_dot_product_attention(q, k, v, is_causal=True)
assert torch.allclose(R.attention(q, k, v, mask), ref, atol=1e-5)
assert torch.allclose(R.attention(q, k, v), W.attention(q, k, v))
assert (W.attention(q, k, v, mask) - ref).abs().max() > 1e-1
k2 = k.clone(); k2[:, :, 4:] = 3 * torch.randn(2, 4, 2, 8)
assert torch.allclose(R.attention(q, k, v, mask)[:, :, :4], R.attention(q, k2, v, mask)[:, :, :4], atol=1e-6)
assert (W.attention(q, k, v, mask)[:, :, :4] - W.attention(q, k2, v, mask)[:, :, :4]).abs().max() > 1e-2
ones = torch.ones_like(v)
assert (W.attention(q, k, ones, mask) - 1).abs().max() > 0.1

print("13 ok")
