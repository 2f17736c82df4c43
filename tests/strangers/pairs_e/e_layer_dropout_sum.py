"""Pre-norm layer with residual dropout."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = "Dropout is applied to the sum x + f(x) rather than to the branch f(x), so in training it eats the residual stream."
PLACE = "residual connections of the layer"


class Layer(nn.Module):
    def __init__(self, d, h, ff, p):
        super().__init__()
        self.h, self.drop = h, nn.Dropout(p)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o, self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, ff), nn.Linear(ff, d)

    def attend(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        s = q @ k.mT * q.shape[-1] ** -0.5
        if mask is None:
            w = s.softmax(-1)
        else:
            hide = ~mask.bool()[:, None, None]
            w = s.masked_fill(hide, torch.finfo(s.dtype).min).softmax(-1).masked_fill(hide, 0.0)
        return self.o((w @ v).transpose(1, 2).flatten(2))

    def add(self, x, y):
        return x + self.drop(y)

    def forward(self, x, mask=None):
        x = self.add(x, self.attend(self.n1(x), mask))
        return self.add(x, self.down(F.gelu(self.up(self.n2(x)))))


class DropSum(Layer):
    def add(self, x, y):
        return self.drop(x + y)


def subject(cls):
    return Subject(kind="layer", build=lambda c: cls(c.d_model, c.num_heads, c.d_ff, c.dropout), mask_forms=("padding",),
                   forward=lambda m, x, attention_mask=None: m(x, attention_mask),
                   declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre",
                             "activation": "gelu", "residual": True, "bias": True})


right, wrong = subject(Layer), subject(DropSum)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Layer(16, 2, 32, 0.5), DropSum(16, 2, 32, 0.5)
    z.load_state_dict(a.state_dict())
    x = torch.randn(2, 5, 16)
    q, k, v = (u.view(2, 5, 2, 8).transpose(1, 2) for u in a.qkv(a.n1(x)).chunk(3, -1))
    y = x + a.o(((q @ k.mT / 8 ** 0.5).softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 16))
    want = y + a.down(F.gelu(a.up(a.n2(y))))
    for name, m, same in (("right", a, True), ("wrong", z, False)):
        d = (m.eval()(x) - want).abs().max().item()
        gone = (m.train()(x) == 0).float().mean().item()
        print(name, "eval", d, "share of zeros in training", gone)
        assert d < 1e-5 and (gone < 0.01 if same else gone > 0.4)
