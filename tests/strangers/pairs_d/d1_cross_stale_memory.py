import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject

WHAT = ("Without gradients the keys and values of the memory are kept in the module and used again whenever the next "
        "memory has the same shape, so a second memory of that shape is never looked at.")
PLACE = "key-value cache of cross-attention at inference, its key is the shape"


class Cross(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, 2 * d, bias=False), nn.Linear(d, d, bias=False)
        self.heads = heads

    def split(self, t):
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def key_value(self, memory):
        k, v = self.kv(memory).chunk(2, -1)
        return self.split(k), self.split(v)

    def forward(self, x, memory, memory_mask=None):
        q, (k, v) = self.split(self.q(x)), self.key_value(memory)
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if memory_mask is not None:
            s = s.masked_fill(~memory_mask.bool()[:, None, None], torch.finfo(s.dtype).min)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class CrossKeeping(Cross):
    kept = None

    def key_value(self, memory):
        if torch.is_grad_enabled() or self.training:
            self.kept = None
            return super().key_value(memory)
        tag = (tuple(memory.shape), memory.dtype, memory.device)
        if self.kept is None or self.kept[0] != tag:
            self.kept = tag, super().key_value(memory)
        return self.kept[1]


FACTS = {"bias": False, "positions": "none", "empty_row": "mean"}
right = Subject(kind="cross_attention", build=lambda c: Cross(c.d_model, c.num_heads), declares=FACTS, name="cross")
wrong = Subject(kind="cross_attention", build=lambda c: CrossKeeping(c.d_model, c.num_heads), declares=FACTS, name="cross")

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    a, b = Cross(16, 2).double().eval(), CrossKeeping(16, 2).double().eval()
    b.load_state_dict(a.state_dict())
    x = torch.randn(2, 4, 16, dtype=torch.float64)
    far = []
    with torch.no_grad():
        for mem in (torch.randn(2, 7, 16, dtype=torch.float64), torch.randn(2, 7, 16, dtype=torch.float64)):
            wk, wv = a.kv.weight.chunk(2)
            h = lambda t: t.view(2, -1, 2, 8).transpose(1, 2)
            y = F.scaled_dot_product_attention(h(x @ a.q.weight.T), h(mem @ wk.T), h(mem @ wv.T))
            naive = y.transpose(1, 2).reshape(2, 4, 16) @ a.o.weight.T
            far.append([(m(x, mem) - naive).abs().max().item() for m in (a, b)])
    with_grad = (b(x, mem) - naive).abs().max().item()
    print(far, with_grad)
    assert far[0][0] < 1e-12 and far[1][0] < 1e-12
    assert far[0][1] < 1e-12 and far[1][1] > 1e-2 and with_grad < 1e-12
