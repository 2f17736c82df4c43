import importlib.util
import os
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)


def load(tag):
    name = "m14_" + tag
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "14_" + tag + ".py"))
    mod = importlib.util.module_from_spec(spec)
    sys.modules[name] = mod
    spec.loader.exec_module(mod)
    return mod


R, W = load("right"), load("wrong")
torch.manual_seed(0)

r, w = R.LabelSmoothedCrossEntropy(), W.LabelSmoothedCrossEntropy()
logits = torch.randn(2, 6, 11, requires_grad=True)
target = torch.randint(1, 11, (2, 6))
assert torch.allclose(r(logits, target), w(logits, target))
target[0, 3:] = 0
target[1, 5:] = 0
l2 = logits.detach().clone(); l2[0, 3:] = 5 * torch.randn(3, 11)
assert torch.allclose(r(logits, target), r(l2, target))
assert (w(logits, target) - w(l2, target)).abs() > 1e-2
g_r, = torch.autograd.grad(r(logits, target), logits)
g_w, = torch.autograd.grad(w(logits, target), logits)
assert g_r[0, 3:].abs().max() == 0 and g_w[0, 3:].abs().max() > 1e-4

print("14 ok")
