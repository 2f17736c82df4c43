"""A layer that runs its feed-forward part on the real tokens alone (packed), then puts them back."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = "Packed rows are put back at 0..length-1 of each sample, which is where they came from only if the padding stands on the right."
PLACE = "indices with which the packed tokens are scattered back"


def from_mask(mask):
    return mask.flatten().nonzero().flatten()


def from_lengths(mask):
    t = mask.shape[1]
    return torch.cat([torch.arange(n, device=mask.device) + b * t for b, n in enumerate(mask.sum(1).tolist())])


class Layer(nn.Module):
    def __init__(self, d, h, ff, back):
        super().__init__()
        self.h, self.back = h, back
        self.n1, self.n2 = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.w1, self.w2 = nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)

    def forward(self, x, mask=None):
        b, t, d = x.shape
        mask = torch.ones(b, t, dtype=torch.bool, device=x.device) if mask is None else mask.bool()
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.mT * q.shape[-1] ** -0.5
        hide = ~mask[:, None, None]
        w = s.masked_fill(hide, torch.finfo(s.dtype).min).softmax(-1).masked_fill(hide, 0.0)
        x = x + self.o((w @ v).transpose(1, 2).reshape(b, t, d))
        packed = x.reshape(-1, d)[from_mask(mask)]
        y = self.w2(F.relu(self.w1(self.n2(packed))))
        return x + torch.zeros_like(x).view(-1, d).index_copy(0, self.back(mask), y.to(x.dtype)).view(b, t, d)


def subject(back):
    return Subject(kind="layer", build=lambda c: Layer(c.d_model, c.num_heads, c.d_ff, back), mask_forms=("padding",),
                   forward=lambda m, x, attention_mask=None: m(x, attention_mask),
                   declares={"causal": False, "positions": "none", "norm": "rms", "norm_placement": "pre",
                             "activation": "relu", "residual": True, "bias": False, "padding_side": "both"})


right, wrong = subject(from_mask), subject(from_lengths)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Layer(16, 2, 32, from_mask), Layer(16, 2, 32, from_lengths)
    z.load_state_dict(a.state_dict())
    x = torch.randn(2, 5, 16)
    for side, mask in (("right", [[1, 1, 1, 0, 0], [1] * 5]), ("left", [[0, 0, 1, 1, 1], [1] * 5])):
        keep = torch.tensor(mask).bool()
        want = torch.cat([a(x[i:i + 1, keep[i]])[0] for i in range(2)])
        u = x[1:]
        q, k, v = (p.view(1, 5, 2, 8).transpose(1, 2) for p in a.qkv(a.n1(u)).chunk(3, -1))
        y = u + a.o(((q @ k.mT / 8 ** 0.5).softmax(-1) @ v).transpose(1, 2).reshape(1, 5, 16))
        y = y + a.w2(F.relu(a.w1(a.n2(y))))
        dr, dw = ((m(x, keep)[keep] - want).abs().max().item() for m in (a, z))
        print(side, "naive", (y[0] - want[-5:]).abs().max().item(), dr, dw)
        assert torch.allclose(y[0], want[-5:], atol=1e-5) and dr < 1e-5 and (dw > 1e-2) == (side == "left")
