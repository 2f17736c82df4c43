import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m23_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "23_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

r, w = R.SparseMoE(), W.SparseMoE()
w.load_state_dict(r.state_dict())
x = torch.randn(2, 7, 32)
with torch.no_grad():
    flat = x.reshape(-1, 32)
    p = r.gate(flat).softmax(-1)
    top, ind = p.topk(2, -1)
    top = top / top.sum(-1, keepdim=True)
    ref = torch.stack([sum(top[t, s] * r.experts[ind[t, s]](flat[t]) for s in range(2)) for t in range(14)])
    assert torch.allclose(r(x)[0].reshape(-1, 32), ref, atol=1e-5)
    assert (w(x)[0].reshape(-1, 32) - ref).abs().max() > 1e-2
    # identical experts: the weights sum to 1, so the answer is that expert's
    for m in (r, w):
        for e in m.experts[1:]:
            e.load_state_dict(m.experts[0].state_dict())
    one = r.experts[0](flat)
    assert torch.allclose(r(x)[0].reshape(-1, 32), one, atol=1e-5)
    assert (w(x)[0].reshape(-1, 32) - one).abs().max() > 1e-2

print("23 ok")
