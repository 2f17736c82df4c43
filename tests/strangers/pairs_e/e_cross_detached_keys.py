"""Cross-attention whose keys may be built ahead of time."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "The keys are made from memory.detach(), so the encoder learns through the values alone and never how to be attended to."
PLACE = "key projection of the memory"


class Cross(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def keys(self, memory):
        return self.k(memory)

    def forward(self, x, memory, memory_mask=None):
        q, k, v = (z.unflatten(-1, (self.h, -1)).movedim(2, 1) for z in (self.q(x), self.keys(memory), self.v(memory)))
        s = torch.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
        if memory_mask is not None:
            hide = ~memory_mask.bool()[:, None, None]
            w = s.masked_fill(hide, torch.finfo(s.dtype).min).softmax(-1).masked_fill(hide, 0.0)
        else:
            w = s.softmax(-1)
        return self.o((w @ v).movedim(1, 2).flatten(2))


class Ahead(Cross):
    def keys(self, memory):
        return self.k(memory.detach())


def subject(cls):
    return Subject(kind="cross_attention", build=lambda c: cls(c.d_model, c.num_heads), mask_forms=("padding",),
                   forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
                   projections=lambda m: {n: getattr(m, n).weight for n in "qkvo"},
                   declares={"bias": False, "empty_row": "zeros"})


right, wrong = subject(Cross), subject(Ahead)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Cross(8, 2).double(), Ahead(8, 2).double()
    z.load_state_dict(a.state_dict())
    x, mem = torch.randn(1, 3, 8).double(), torch.randn(1, 4, 8).double().requires_grad_()
    q, k, v = (f(y).view(1, -1, 2, 4).transpose(1, 2) for f, y in ((a.q, x), (a.k, mem), (a.v, mem)))
    want = a.o(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).reshape(1, 3, 8))
    gw, = torch.autograd.grad(want.pow(2).sum(), mem)
    e = torch.zeros_like(mem)
    e[0, 1, 2] = 1e-5
    with torch.no_grad():
        fd = ((a(x, mem + e) ** 2).sum() - (a(x, mem - e) ** 2).sum()).item() / 2e-5
    print("finite difference", fd, "naive", gw[0, 1, 2].item())
    assert abs(fd - gw[0, 1, 2].item()) < 1e-5
    for name, m, same in (("right", a, True), ("wrong", z, False)):
        out = m(x, mem)
        d = (torch.autograd.grad(out.pow(2).sum(), mem)[0] - gw).abs().max().item()
        print(name, (out - want).abs().max().item(), d)
        assert torch.allclose(out, want) and (d < 1e-9) == same
