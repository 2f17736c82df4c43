import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m03_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "03_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

r, w = R.Transformer(R.ModelArgs()).eval(), W.Transformer(W.ModelArgs()).eval()
w.load_state_dict(r.state_dict())
ids = torch.randint(0, 100, (2, 16))
full = r(ids, 0)
assert torch.allclose(full, w(ids, 0), atol=1e-6)


def stepwise(m):
    outs = [m(ids[:, :6], 0)] + [m(ids[:, i : i + 1], i) for i in range(6, 16)]
    return torch.cat(outs, 1)


assert torch.allclose(stepwise(r), full, atol=1e-4)
assert (stepwise(w) - full).abs().max() > 1e-2

print("03 ok")
