import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m12_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "12_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

r, w = R.CrossAttentionBlock().eval(), W.CrossAttentionBlock().eval()
w.load_state_dict(r.state_dict())
x, c = torch.randn(3, 5, 32), torch.randn(3, 9, 48)
mask = torch.arange(9)[None] < torch.tensor([3, 9, 6])[:, None]
c2 = torch.where(mask[..., None], c, torch.randn_like(c))
with torch.no_grad():
    assert torch.allclose(r(x, c), w(x, c), atol=1e-6)
    assert torch.allclose(r(x[:1], c[:1], mask[:1]), w(x[:1], c[:1], mask[:1]), atol=1e-6)
    assert torch.allclose(r(x, c, mask), r(x, c2, mask), atol=1e-5)
    assert (w(x, c, mask) - w(x, c2, mask)).abs().max() > 1e-2
    assert torch.allclose(r(x, c, mask)[:1], r(x[:1], c[:1], mask[:1]), atol=1e-5)
    assert (w(x, c, mask)[:1] - w(x[:1], c[:1], mask[:1])).abs().max() > 1e-2

print("12 ok")
