import math
from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("the additive form of the padding mask is remembered and reused while its shape stays the same, so a second batch of the "
        "same shape is attended to under the mask of the first")
PLACE = "Layer.additive: condition of the memo compares shapes, not masks"


class Layer(nn.Module):
    def __init__(self, c, by_shape):
        super().__init__()
        d = c.d_model
        self.h, self.by_shape, self.memo = c.num_heads, by_shape, None
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.query, self.key, self.value, self.merge = (nn.Linear(d, d) for _ in range(4))
        self.ff = nn.Sequential(nn.Linear(d, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, d))

    def additive(self, mask, x):
        if self.by_shape and self.memo is not None and self.memo.shape[::3] == mask.shape and self.memo.dtype == x.dtype:
            return self.memo
        self.memo = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask.bool(), torch.finfo(x.dtype).min)[:, None, None]
        return self.memo

    def forward(self, x, mask=None):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.h, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        s = q @ k.mT / math.sqrt(d // self.h)
        if mask is not None:
            s = s + self.additive(mask, s)
        x = self.ln1(x + self.merge((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d)))
        return self.ln2(x + self.ff(x))


def _make(by_shape):
    return Subject(kind="layer", build=lambda c: Layer(c, by_shape), mask_forms=("padding",),
                   forward=lambda m, x, attention_mask=None: m(x, attention_mask),
                   declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "post", "residual": True,
                             "activation": "gelu", "bias": True})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, d_ff=32)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    x = torch.randn(2, 6, 16)
    for step, lengths in enumerate(([6, 4], [3, 5], [6, 4])):
        m = torch.arange(6)[None] < torch.tensor(lengths)[:, None]; e = [0.0, 0.0]
        for i, n in enumerate(lengths):                                 # naive: each sample alone, head by head, no mask
            z = x[i, :n]; y = torch.cat([((a.query(z)[:, h:h + 8] @ a.key(z)[:, h:h + 8].T) / 8 ** .5).softmax(-1)
                                         @ a.value(z)[:, h:h + 8] for h in (0, 8)], 1)
            y = a.ln1(z + a.merge(y)); naive = a.ln2(y + a.ff(y))
            e = [max(w, (net(x, m)[i, :n] - naive).abs().max().item()) for w, net in zip(e, (a, b))]
        print("call", step, lengths, "right", e[0], "wrong", e[1])
        assert e[0] < 1e-5 and (e[1] > 1e-2) == (step == 1)
