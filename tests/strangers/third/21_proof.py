import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m21_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "21_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

b_r, b_w = R.build_alibi(6, 20), W.build_alibi(6, 20)
assert (b_r[:, 19, :19] < 0).all() and (b_w[:, 19, :19] > 0).all()
r, w = R.AlibiLM().eval(), W.AlibiLM().eval()
w.load_state_dict(r.state_dict())
for m in (r, w):  # no content in the scores: position alone decides
    a = m.layers[0].attn
    a.qkv.weight.data[:96] = 0
    a.qkv.bias.data[:96] = 0
ids = torch.randint(0, 80, (1, 40))
with torch.no_grad():
    assert (r(ids) - w(ids)).abs().max() > 1e-2
    far, near = ids.clone(), ids.clone()
    far[0, 0] = (far[0, 0] + 1) % 80
    near[0, 38] = (near[0, 38] + 1) % 80

    def attn_change(m, other):
        bias = (R if m is r else W).build_alibi(6, 40).masked_fill(torch.ones(40, 40).triu(1).bool(), float("-inf"))
        f = lambda i: m.layers[0].attn(m.layers[0].ln_a(m.emb(i)), bias)[0, 39]
        return (f(ids) - f(other)).norm()

    assert attn_change(r, near) > 5 * attn_change(r, far)
    assert attn_change(w, far) > 5 * attn_change(w, near)

print("21 ok")
