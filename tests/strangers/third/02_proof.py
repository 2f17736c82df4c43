import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m02_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "02_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

r, w = R.TinyStoryForCausalLM(R.TinyStoryConfig()), W.TinyStoryForCausalLM(W.TinyStoryConfig())
w.load_state_dict(r.state_dict())
ids = torch.randint(0, 128, (4, 20))
o_r, o_w = r(ids, labels=ids), w(ids, labels=ids)
assert torch.equal(o_r["logits"], o_w["logits"])
ref = F.cross_entropy(o_r["logits"][:, :-1].reshape(-1, 128), ids[:, 1:].reshape(-1))
assert torch.allclose(o_r["loss"], ref, atol=1e-6)
assert not torch.allclose(o_w["loss"], ref, atol=1e-4)
# the first token's label has nothing before it: only wrong's loss depends on it; the last label: only right's
l2 = ids.clone(); l2[:, -1] = -100
assert not torch.equal(r(ids, labels=l2)["loss"], o_r["loss"])
assert torch.equal(w(ids, labels=l2)["loss"], o_w["loss"])

print("02 ok")
