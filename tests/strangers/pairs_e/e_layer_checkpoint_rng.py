"""Layer whose feed-forward part is recomputed in the backward pass."""
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from veriformer.properties import Subject

WHAT = "The checkpoint does not restore the random state, so the backward pass runs with other dropout masks than the forward pass."
PLACE = "preserve_rng_state of the checkpointed feed-forward block"


class Layer(nn.Module):
    def __init__(self, d, h, ff, p, preserve):
        super().__init__()
        self.h, self.p, self.preserve = h, p, preserve
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o, self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, ff), nn.Linear(ff, d)

    def ff(self, x):
        return self.down(F.dropout(F.relu(self.up(self.n2(x))), self.p, self.training))

    def forward(self, x, mask=None, save=True):
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / q.shape[-1] ** 0.5
        ok = torch.ones_like(s, dtype=torch.bool) if mask is None else mask.bool()[:, None, None].expand_as(s)
        w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
        x = x + self.o((w @ v).transpose(1, 2).flatten(2))
        if save and self.training and torch.is_grad_enabled():
            return x + checkpoint(self.ff, x, use_reentrant=False, preserve_rng_state=self.preserve)
        return x + self.ff(x)


def subject(preserve):
    return Subject(kind="layer", build=lambda c: Layer(c.d_model, c.num_heads, c.d_ff, c.dropout, preserve),
                   forward=lambda m, x, attention_mask=None: m(x, attention_mask), mask_forms=("padding",),
                   declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre",
                             "activation": "relu", "residual": True, "bias": True})


right, wrong = subject(True), subject(False)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Layer(16, 2, 32, 0.5, True), Layer(16, 2, 32, 0.5, False)
    z.load_state_dict(a.state_dict())
    x = torch.randn(2, 5, 16, requires_grad=True)

    def grad(m, save):
        torch.manual_seed(1)
        out = m(x, save=save)
        return out.detach(), torch.autograd.grad(out.pow(2).sum(), x)[0]

    y, g = grad(a, False)
    for name, m, same in (("right", a, True), ("wrong", z, False)):
        out, got = grad(m, True)
        d = (got - g).abs().max().item()
        print(name, (out - y).abs().max().item(), d)
        assert torch.equal(out, y) and (d < 1e-5) == same
