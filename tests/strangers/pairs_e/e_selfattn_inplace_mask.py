"""Self-attention that inverts the padding mask before it fills."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "A boolean mask is inverted in place, so the caller's mask is turned round and the next layer hides the real tokens."
PLACE = "inversion of the attention mask"


class SelfAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.inp, self.out = h, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def hidden(self, mask):
        return mask.bool().logical_not()

    def forward(self, x, mask=None):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.h, -1).transpose(1, 2) for z in self.inp(x).chunk(3, -1))
        s = q @ k.transpose(-1, -2) * (d // self.h) ** -0.5
        if mask is None:
            return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
        hide = self.hidden(mask)[:, None, None, :]
        w = s.masked_fill(hide, torch.finfo(s.dtype).min).softmax(-1).masked_fill(hide, 0.0)
        return self.out((w @ v).transpose(1, 2).reshape(b, t, d))


class InPlace(SelfAttention):
    def hidden(self, mask):
        return mask.bool().logical_not_()  # bool() copies nothing where the mask is boolean


def subject(cls):
    return Subject(kind="self_attention", build=lambda c: cls(c.d_model, c.num_heads), mask_forms=("padding",),
                   forward=lambda m, x, attention_mask=None: m(x, attention_mask),
                   declares={"causal": False, "positions": "none", "bias": True, "empty_row": "zeros"})


right, wrong = subject(SelfAttention), subject(InPlace)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = SelfAttention(16, 2), InPlace(16, 2)
    z.load_state_dict(a.state_dict())
    x, mask = torch.randn(2, 5, 16), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    want = torch.cat([a(x[:1, :3]), a(x[1:, :3])])
    for name, m, same in (("right", a, True), ("wrong", z, False)):
        given = mask.clone()
        first = m(x, given)
        kept, second = torch.equal(given, mask), m(x, given)
        print(name, "mask kept:", kept, (first[:1, :3] - want[:1]).abs().max().item(), (first - second).abs().max().item())
        assert torch.allclose(first[:1, :3], want[:1], atol=1e-5)
        assert kept == same and torch.allclose(first, second) == same
