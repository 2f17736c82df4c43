import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m05_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "05_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

r, w = R.BertModel().eval(), W.BertModel().eval()
w.load_state_dict(r.state_dict())
ids = torch.randint(1, 200, (2, 8))
seg = torch.zeros_like(ids)
junk1, junk2 = torch.randint(1, 200, (2, 2, 6)).unbind(0)
mask = torch.cat([torch.ones(2, 8, dtype=torch.long), torch.zeros(2, 6, dtype=torch.long)], 1)
seg = torch.zeros(2, 14, dtype=torch.long); seg[:, 4:] = 1
with torch.no_grad():
    f = lambda m, j: m(torch.cat([ids, j], 1), seg, mask)
    assert torch.allclose(f(r, junk1)[0][:, :8], f(r, junk2)[0][:, :8], atol=1e-5)
    assert (f(w, junk1)[0][:, :8] - f(w, junk2)[0][:, :8]).abs().max() > 1e-2
    assert (f(w, junk1)[1] - f(w, junk2)[1]).abs().max() > 1e-3
    assert torch.allclose(r(ids)[0], w(ids)[0], atol=1e-5)

print("05 ok")
