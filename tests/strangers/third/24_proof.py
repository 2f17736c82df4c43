import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m24_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "24_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

r, w = R.WindowLM().eval(), W.WindowLM().eval()
w.load_state_dict(r.state_dict())
ids = torch.randint(0, 128, (2, 24))
with torch.no_grad():
    a_r, a_w = r(ids), w(ids)
    assert torch.allclose(a_r, a_w, atol=1e-6)
    assert torch.allclose(r(ids, n_prefix=5), w(ids, n_prefix=5), atol=1e-5)
    b_r, b_w = r(ids), w(ids)
    assert torch.equal(a_r, b_r)
    assert (a_w - b_w).abs().max() > 1e-2
    other = ids.clone(); other[:, 3] = (other[:, 3] + 1) % 128
    assert torch.allclose(r(ids)[:, :3], r(other)[:, :3], atol=1e-6)
    assert (w(ids)[:, :3] - w(other)[:, :3]).abs().max() > 1e-3

print("24 ok")
