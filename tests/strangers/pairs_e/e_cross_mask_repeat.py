"""Cross-attention with batch and heads in one axis, for bmm."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "The memory mask is tiled with repeat(H, 1) although the flat axis is (batch, head), so samples get one another's mask."
PLACE = "spreading the memory mask over the heads"


class Cross(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.d = h, d // h
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d) for _ in range(4))

    def spread(self, mask):
        return mask.repeat_interleave(self.h, 0)

    def flat(self, z):
        return z.unflatten(-1, (self.h, self.d)).transpose(1, 2).flatten(0, 1)

    def forward(self, x, memory, memory_mask=None):
        q, k, v = self.flat(self.wq(x)), self.flat(self.wk(memory)), self.flat(self.wv(memory))
        s = torch.bmm(q, k.transpose(1, 2)) / self.d ** 0.5
        if memory_mask is None:
            w = s.softmax(-1)
        else:
            hide = ~self.spread(memory_mask.bool())[:, None]
            w = s.masked_fill(hide, torch.finfo(s.dtype).min).softmax(-1).masked_fill(hide, 0.0)
        return self.wo(torch.bmm(w, v).unflatten(0, (-1, self.h)).transpose(1, 2).flatten(2))


class Tiled(Cross):
    def spread(self, mask):
        return mask.repeat(self.h, 1)


def subject(cls):
    return Subject(kind="cross_attention", build=lambda c: cls(c.d_model, c.num_heads), mask_forms=("padding",),
                   forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
                   projections=lambda m: {"q": m.wq.weight, "k": m.wk.weight, "v": m.wv.weight, "o": m.wo.weight,
                                          "q_bias": m.wq.bias, "k_bias": m.wk.bias, "v_bias": m.wv.bias,
                                          "o_bias": m.wo.bias},
                   declares={"bias": True, "empty_row": "zeros"})


right, wrong = subject(Cross), subject(Tiled)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Cross(16, 2), Tiled(16, 2)
    z.load_state_dict(a.state_dict())
    x, mem, lens = torch.randn(3, 2, 16), torch.randn(3, 5, 16), (1, 3, 5)
    mask = torch.arange(5) < torch.tensor(lens)[:, None]
    want = torch.cat([a(x[i:i + 1], mem[i:i + 1, :n]) for i, n in enumerate(lens)])
    s = (a.wq(x[:1, :, ]) .view(1, 2, 2, 8).transpose(1, 2) @ a.wk(mem[:1]).view(1, 5, 2, 8).permute(0, 2, 3, 1)) / 8 ** 0.5
    naive = a.wo((s.softmax(-1) @ a.wv(mem[:1]).view(1, 5, 2, 8).transpose(1, 2)).transpose(1, 2).reshape(1, 2, 16))
    print("unmasked against naive", (a(x[:1], mem[:1]) - naive).abs().max().item())
    dr, dw = (a(x, mem, mask) - want).abs().max().item(), (z(x, mem, mask) - want).abs().max().item()
    d1 = (z(x[:1], mem[:1], mask[:1]) - want[:1]).abs().max().item()
    print(dr, dw, "batch of one:", d1)
    assert torch.allclose(a(x[:1], mem[:1]), naive, atol=1e-5) and dr < 1e-5 and dw > 1e-2 and d1 < 1e-5
