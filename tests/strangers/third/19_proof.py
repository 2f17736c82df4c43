import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m19_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "19_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

r, w = R.DecoderLM().eval(), W.DecoderLM().eval()
for p in r.parameters():
    if p.dim() > 1:
        torch.nn.init.normal_(p, std=0.3)
w.load_state_dict(r.state_dict())
ids = torch.randint(0, 96, (2, 14))


def stepwise(m):
    lo, c = m(ids[:, :8])
    outs = [lo]
    for i in range(8, 14):
        lo, c = m(ids[:, i : i + 1], c)
        outs.append(lo)
    return torch.cat(outs, 1)


with torch.no_grad():
    full = r(ids)[0]
    assert torch.allclose(full, w(ids)[0], atol=1e-5)
    assert torch.allclose(stepwise(r), full, atol=1e-3)
    assert (stepwise(w) - full).abs().max() > 0.1
    assert not torch.equal(r.generate(ids, 12), w.generate(ids, 12))

print("19 ok")
