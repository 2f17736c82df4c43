import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m07_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "07_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

torch.manual_seed(1)
r = R.make_model(50, 60).eval()
torch.manual_seed(1)
w = W.make_model(50, 60).eval()
assert len({id(l) for l in r.enc_layers}) == 3 and len({id(l) for l in w.enc_layers}) == 1
nr, nw = sum(p.numel() for p in r.parameters()), sum(p.numel() for p in w.parameters())
assert nw < 0.6 * nr, (nr, nw)
src, tgt = torch.randint(0, 50, (2, 7)), torch.randint(0, 60, (2, 6))
sm, tm = torch.ones(2, 1, 7), R.subsequent_mask(6)
with torch.no_grad():
    assert (r(src, tgt, sm, tm) - w(src, tgt, sm, tm)).abs().max() > 1e-2
    # a change to layer 2's value projection must leave the output of layer 0 alone
    for m, same in ((r, True), (w, False)):
        x = m.src_embed(src)
        a = m.enc_layers[0](x, sm)
        m.enc_layers[2].self_attn.linears[2].weight.mul_(3.0)
        b = m.enc_layers[0](x, sm)
        assert torch.equal(a, b) is same

print("07 ok")
