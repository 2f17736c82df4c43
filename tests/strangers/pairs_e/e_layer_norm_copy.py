"""Post-norm layer written out by hand."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "A copied line: the feed-forward block ends in norm1 again, so norm2 is never trained and norm1 serves both."
PLACE = "second residual block of forward"


class Layer(nn.Module):
    def __init__(self, d, heads, ff):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d))

    def mix(self, x, mask):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = q @ k.mT * (self.heads / d) ** 0.5
        if mask is not None:
            s = s.masked_fill(~mask.bool()[:, None, None], torch.finfo(s.dtype).min)
        w = s.softmax(-1)
        if mask is not None:
            w = w * mask.bool()[:, None, None]
        return self.o((w @ v).transpose(1, 2).reshape(b, t, d))

    def forward(self, x, mask=None):
        x = self.norm1(x + self.mix(x, mask))
        return self.norm2(x + self.ff(x))


class Copied(Layer):
    def forward(self, x, mask=None):
        x = self.norm1(x + self.mix(x, mask))
        return self.norm1(x + self.ff(x))


def subject(cls):
    return Subject(kind="layer", build=lambda c: cls(c.d_model, c.num_heads, c.d_ff), mask_forms=("padding",),
                   forward=lambda m, x, attention_mask=None: m(x, attention_mask),
                   declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "post",
                             "activation": "relu", "residual": True, "bias": True, "structure": "textbook"})


right, wrong = subject(Layer), subject(Copied)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Layer(16, 2, 32), Copied(16, 2, 32)
    ref = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    with torch.no_grad():
        nn.init.normal_(a.norm2.weight, 1.0, 0.5)
        z.load_state_dict(a.state_dict())
        ref.self_attn.in_proj_weight.copy_(torch.cat([a.q.weight, a.k.weight, a.v.weight]))
        ref.self_attn.in_proj_bias.copy_(torch.cat([a.q.bias, a.k.bias, a.v.bias]))
        for mine, theirs in ((a.o, ref.self_attn.out_proj), (a.ff[0], ref.linear1), (a.ff[2], ref.linear2),
                             (a.norm1, ref.norm1), (a.norm2, ref.norm2)):
            theirs.load_state_dict(mine.state_dict())
    x = torch.randn(2, 5, 16)
    dr, dw = (a(x) - ref(x)).abs().max().item(), (z(x) - ref(x)).abs().max().item()
    a(x).square().sum().backward(), z(x).square().sum().backward()
    print(dr, dw, "gradient of norm2:", a.norm2.weight.grad is not None, z.norm2.weight.grad is not None)
    assert dr < 1e-5 and dw > 1e-2 and a.norm2.weight.grad is not None and z.norm2.weight.grad is None
