import math
from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("positions of a padded batch are counted over real tokens in the first pass, but tokens decoded with a cache get the "
        "number of cache slots (padding counted too), so left-padded samples jump ahead by their padding")
PLACE = "Gpt.forward: position ids when `past` is not empty"


class Layer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h, self.ln1, self.ln2 = h, nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.f1, self.f2 = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, ok, past):
        b, t, d = x.shape
        y = self.ln1(x)
        split = lambda z: z.view(b, -1, self.h, d // self.h).transpose(1, 2)
        k, v = self.k(y), self.v(y)
        if past:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        past[:] = [k, v]
        s = split(self.q(y)) @ split(k).mT / math.sqrt(d // self.h)
        a = s.masked_fill(~ok[:, None], torch.finfo(s.dtype).min).softmax(-1)
        x = x + self.o((a @ split(v)).transpose(1, 2).reshape(b, t, d))
        return x + self.f2(torch.relu(self.f1(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self, c, by_slot):
        super().__init__()
        self.by_slot = by_slot
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.ln, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, ids, mask=None, past=None):
        past = [[] for _ in self.layers] if past is None else past
        start = past[0][0].size(1) if past[0] else 0
        end = start + ids.size(1)
        mask = torch.ones(ids.size(0), end, dtype=torch.bool) if mask is None else mask[:, :end].bool()
        slots = torch.arange(start, end)
        if start and self.by_slot:
            pos = slots.expand(ids.size(0), -1)
        else:
            pos = (mask.long().cumsum(1) - 1).clamp(min=0)[:, start:]
        keys = torch.arange(end)
        ok = (keys[None] <= slots[:, None]) & mask[:, None, :] | (keys[None] == slots[:, None])   # oneself always
        x = self.wte(ids) + self.wpe(pos)
        for layer, p in zip(self.layers, past):
            x = layer(x, ok, p)
        return self.head(self.ln(x))


def cached(m, chunks, attention_mask=None):
    past = [[] for _ in m.layers]
    return torch.cat([m(c, attention_mask, past) for c in chunks], 1)


def _make(flag):
    return Subject(kind="decoder", build=lambda c: Gpt(c, flag), cache=cached,
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   declares={"causal": True, "positions": "learned", "padding_side": "both", "norm_placement": "pre",
                             "activation": "relu"})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=2, d_ff=32, vocab_size=11, max_len=16)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    x = torch.randint(0, 11, (2, 8)); m = torch.ones(2, 8, dtype=torch.bool); m[1, :3] = False
    naive = [a(x[:1])[0], a(x[1:, 3:])[0]]                                  # each sample alone, no padding
    for part in ([8], [4, 2, 1, 1]):
        e = []
        for net in (a, b):
            y = cached(net, x.split(part, 1), m)
            e.append([(y[0] - naive[0]).abs().max().item(), (y[1, 3:] - naive[1]).abs().max().item()])
        print(part, "right", e[0], "wrong", e[1])
        assert max(e[0]) < 1e-4 and e[1][0] < 1e-4 and (e[1][1] > 1e-2) == (len(part) > 1)
