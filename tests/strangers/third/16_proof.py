import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m16_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "16_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

args = R.get_args([])
r, w = R.LanguageModel(args).eval(), W.LanguageModel(args).eval()
w.load_state_dict(r.state_dict())
ids = torch.randint(0, 120, (2, 16))
with torch.no_grad():
    assert torch.equal(r(ids), r(ids))
    assert (w(ids) - w(ids)).abs().max() > 1e-3
    assert not torch.allclose(w(ids), r(ids), atol=1e-3)

print("16 ok")
