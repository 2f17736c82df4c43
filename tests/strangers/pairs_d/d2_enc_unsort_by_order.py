import math
from types import SimpleNamespace
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = ("samples are sorted by length to be processed in tight groups, and put back with the sorting order itself instead of "
        "its inverse; the two agree up to swaps, so it takes three samples in rotated order for answers to land in wrong rows")
PLACE = "LengthSorted.forward: last line, y[order] for y[order.argsort()]"


class Layer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h, self.n1, self.n2 = h, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o, self.a, self.b = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, keep):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / math.sqrt(d // self.h)
        s = s.masked_fill(~keep[:, None, None], torch.finfo(s.dtype).min)
        x = x + self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.b(F.gelu(self.a(self.n2(x))))


class LengthSorted(nn.Module):
    def __init__(self, c, same_order):
        super().__init__()
        self.same_order = same_order
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def encode(self, x, keep):
        for layer in self.layers:
            x = layer(x, keep)
        return self.norm(x)

    def forward(self, ids, mask=None):
        B, T = ids.shape
        x = self.tok(ids) + self.pos(torch.arange(T))
        if mask is None:
            return self.encode(x, torch.ones_like(ids, dtype=torch.bool))
        keep = mask.bool()
        length = (keep * torch.arange(1, T + 1)).amax(1).clamp(min=1)          # up to the last real token
        order = length.argsort(descending=True, stable=True)
        parts = []
        for rows in order.chunk(2):                                            # long half, short half
            n = int(length[rows].max())
            parts.append(F.pad(self.encode(x[rows, :n], keep[rows, :n]), (0, 0, 0, T - n)))
        y = torch.cat(parts)
        return y[order] if self.same_order else y[order.argsort()]


def _make(flag):
    return Subject(kind="encoder", build=lambda c: LengthSorted(c, flag),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   declares={"causal": False, "positions": "learned", "norm_placement": "pre", "padding_side": "right",
                             "final_norm": True, "activation": "gelu"})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=2, d_ff=32, vocab_size=11, max_len=16)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    for lengths, harmful in (([6, 6, 6], False), ([3, 6], False), ([2, 4, 6], False), ([2, 6, 4], True), ([5, 2, 6, 4], True)):
        x = torch.randint(0, 11, (len(lengths), 6)); m = torch.arange(6)[None] < torch.tensor(lengths)[:, None]
        e = [max((net(x, m)[i, :n] - a(x[i:i + 1, :n])[0]).abs().max().item() for i, n in enumerate(lengths)) for net in (a, b)]
        print(lengths, "right", e[0], "wrong", e[1])
        assert e[0] < 1e-4 and (e[1] > 1e-2) == harmful
