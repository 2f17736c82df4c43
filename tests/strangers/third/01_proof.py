import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m01_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "01_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

cfg = R.GPTConfig()
r = R.GPT(cfg).eval()
w = W.GPT(W.GPTConfig()).eval()
for p in r.parameters():
    torch.nn.init.normal_(p, std=0.4)
w.load_state_dict(r.state_dict())
a = torch.randint(0, 65, (1, 48))
nxt = lambda m, i: m.generate(i, 1, top_k=1)[0, -1].item()
assert torch.equal(r.generate(a[:, :8], 10, top_k=1), w.generate(a[:, :8], 10, top_k=1))
out_r, out_w = r.generate(a, 12, top_k=1), w.generate(a, 12, top_k=1)
assert not torch.equal(out_r, out_w)
# greedy next token must be the argmax for the last block_size tokens
for i in range(12):
    ctx = out_r[:, : 48 + i][:, -32:]
    assert r(ctx)[0][0, -1].argmax().item() == out_r[0, 48 + i].item()
# wrong: the same token for ever, whatever the recent tokens are
assert len(set(out_w[0, 48:].tolist())) == 1 and len(set(out_r[0, 48:].tolist())) > 1

print("01 ok")
