import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m17_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "17_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

r, w = R.BigramLanguageModel().eval(), W.BigramLanguageModel().eval()
assert any("heads.0.key" in n for n, _ in r.named_parameters())
assert not any("heads" in n for n, _ in w.named_parameters())
ids = torch.randint(0, 65, (2, 16))
for cls, same in ((R.BigramLanguageModel, True), (W.BigramLanguageModel, False)):
    a, b = cls().eval(), cls().eval()
    b.load_state_dict(a.state_dict())
    for m in (a, b):  # rule out dropout: the weights alone
        for blk in m.blocks:
            for h in blk.sa.heads:
                h.eval()
    with torch.no_grad():
        assert torch.allclose(a(ids)[0], b(ids)[0], atol=1e-5) is same
with torch.no_grad():
    assert torch.equal(r(ids)[0], r(ids)[0])
    assert (w(ids)[0] - w(ids)[0]).abs().max() > 1e-4

print("17 ok")
