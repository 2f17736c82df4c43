import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("Stochastic depth compensates twice: what is kept is divided by the keep rate in training, and in eval mode the "
        "branches are multiplied by the keep rate besides, so the evaluated layer has branches of 0.8 of their size.")
PLACE = "DropPath.forward, the eval branch"
RATE = 0.2


class DropPath(nn.Module):
    def __init__(self, rate, buggy):
        super().__init__()
        self.keep, self.buggy = 1.0 - rate, buggy

    def forward(self, y):
        if self.training:
            coin = torch.rand(y.shape[0], 1, 1, device=y.device) < self.keep
            return y * coin.to(y.dtype) / self.keep
        return y * self.keep if self.buggy else y


class DeepBlock(nn.Module):
    def __init__(self, d, heads, d_ff, buggy=False):
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_f = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ffn = nn.Sequential(nn.Linear(d, d_ff), nn.GELU(), nn.Linear(d_ff, d))
        self.drop = DropPath(RATE, buggy)

    def mix(self, x, mask):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if mask is not None:
            s = s.masked_fill(~mask.bool()[:, None, None], torch.finfo(s.dtype).min)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x, attention_mask=None):
        x = x + self.drop(self.mix(self.norm_a(x), attention_mask))
        return x + self.drop(self.ffn(self.norm_f(x)))


FACTS = {"causal": False, "norm": "layer", "norm_placement": "pre", "activation": "gelu", "residual": True,
         "positions": "none", "bias": True, "drop_path_scaled": True}
right = Subject(kind="layer", build=lambda c: DeepBlock(c.d_model, c.num_heads, c.d_ff), mask_forms=("padding",),
                declares=FACTS, name="deep block")
wrong = Subject(kind="layer", build=lambda c: DeepBlock(c.d_model, c.num_heads, c.d_ff, True), mask_forms=("padding",),
                declares=FACTS, name="deep block")

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    a, b = DeepBlock(16, 2, 32).double(), DeepBlock(16, 2, 32, True).double()
    b.load_state_dict(a.state_dict())
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    h = x + a.mix(a.norm_a(x), None)
    naive = h + a.ffn(a.norm_f(h))
    gap = [(m.eval()(x) - naive).abs().max().item() for m in (a, b)]
    y = torch.ones(4000, 1, 1, dtype=torch.float64)
    mean = [m.drop.train()(y).mean().item() for m in (a, b)]
    evaluated = [m.drop.eval()(y).mean().item() for m in (a, b)]
    print(gap, mean, evaluated)
    assert gap[0] < 1e-12 and gap[1] > 1e-2
    assert abs(mean[0] - evaluated[0]) < 0.05 and abs(mean[1] - evaluated[1]) > 0.15
