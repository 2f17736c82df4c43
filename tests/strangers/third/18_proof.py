import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m18_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "18_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

r, w = R.Encoder(), W.Encoder()
w.load_state_dict(r.state_dict())
x = 5 * torch.randn(2, 9, 64) + 1
with torch.no_grad():
    assert (r(x) - w(x)).abs().max() > 1e-2
    for m in (r, w):
        for b in m.blocks:
            b.attn.out.weight.zero_()
            b.mlp.down.weight.zero_()
    # with both branches silent a pre-norm block is the identity
    assert torch.equal(r.blocks[0](x), x)
    assert (w.blocks[0](x) - x).abs().max() > 1

print("18 ok")
