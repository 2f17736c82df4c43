import math
from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("with a cache the key-value heads are expanded by repeat (0 1 0 1) where the uncached path uses repeat_interleave "
        "(0 0 1 1), so while decoding most query heads read the keys and values of another group")
PLACE = "GroupedAttention.forward, branch that extends the cache: expansion of key-value heads"


def rotate(x, pos):                                # interleaved pairs
    n = x.size(-1) // 2
    th = pos.to(x)[:, None] / (10000.0 ** (torch.arange(n).to(x) / n))
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.stack([e * th.cos() - o * th.sin(), e * th.sin() + o * th.cos()], -1).flatten(-2)


class GroupedAttention(nn.Module):
    def __init__(self, d, heads, groups, tile):
        super().__init__()
        self.heads, self.groups, self.dh, self.tile = heads, groups, d // heads, tile
        self.wq, self.wo = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.wk = nn.Linear(d, groups * self.dh, bias=False)
        self.wv = nn.Linear(d, groups * self.dh, bias=False)

    def forward(self, x, store):
        b, t, d = x.shape
        q = self.wq(x).view(b, t, self.heads, self.dh).transpose(1, 2)
        k = self.wk(x).view(b, t, self.groups, self.dh).transpose(1, 2)
        v = self.wv(x).view(b, t, self.groups, self.dh).transpose(1, 2)
        past = store["k"].size(2) if store else 0
        pos = torch.arange(past, past + t)
        q, k, r = rotate(q, pos), rotate(k, pos), self.heads // self.groups
        if store:
            k, v = torch.cat([store["k"], k], 2), torch.cat([store["v"], v], 2)
        store.update(k=k, v=v)
        if past and self.tile:
            k, v = k.repeat(1, r, 1, 1), v.repeat(1, r, 1, 1)
        else:
            k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        s = q @ k.mT / math.sqrt(self.dh)
        s = s.masked_fill(torch.arange(past + t)[None] > pos[:, None], -math.inf)
        return self.wo((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class Net(nn.Module):
    def __init__(self, c, tile):
        super().__init__()
        d = c.d_model
        self.tok, self.n, self.head = nn.Embedding(c.vocab_size, d), nn.RMSNorm(d), nn.Linear(d, c.vocab_size, bias=False)
        self.att = nn.ModuleList(GroupedAttention(d, c.num_heads, c.num_key_value_heads, tile) for _ in range(c.num_layers))
        self.ffn = nn.ModuleList(nn.Sequential(nn.RMSNorm(d), nn.Linear(d, c.d_ff), nn.SiLU(), nn.Linear(c.d_ff, d)) for _ in self.att)
        self.pre = nn.ModuleList(nn.RMSNorm(d) for _ in self.att)

    def forward(self, ids, stores=None):
        stores = [{} for _ in self.att] if stores is None else stores
        x = self.tok(ids)
        for n, a, f, s in zip(self.pre, self.att, self.ffn, stores):
            x = x + a(n(x), s)
            x = x + f(x)
        return self.head(self.n(x))


def chunked(m, chunks):
    stores = [{} for _ in m.att]
    return torch.cat([m(c, stores) for c in chunks], 1)


def _make(tile):
    return Subject(kind="decoder", build=lambda c: Net(c, tile), forward=lambda m, tokens: m(tokens), cache=chunked,
                   declares={"causal": True, "positions": "rotary", "layout": "interleaved", "grouped_queries": True,
                             "norm": "rms", "norm_placement": "pre"},
                   domain={"d_model": [32, 64], "num_heads": [4, 8], "num_key_value_heads": [1, 2, 4]})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    for g in (1, 2, 4):
        c = SimpleNamespace(d_model=32, num_heads=4, num_key_value_heads=g, num_layers=2, d_ff=32, vocab_size=11)
        a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
        at, x = a.att[0], torch.randn(1, 5, 32); out = torch.zeros(5, 32)   # naive: one head and one query at a time
        for h in range(4):
            q = rotate(at.wq(x)[0, :, h * 8:h * 8 + 8], torch.arange(5)); j = h // (4 // g)
            k, v = rotate(at.wk(x)[0, :, j * 8:j * 8 + 8], torch.arange(5)), at.wv(x)[0, :, j * 8:j * 8 + 8]
            for t in range(5):
                out[t, h * 8:h * 8 + 8] = ((q[t] @ k[:t + 1].T) / 8 ** .5).softmax(-1) @ v[:t + 1]
        assert torch.allclose(at(x, {})[0], at.wo(out), atol=1e-5)
        ids = torch.randint(0, 11, (2, 7)); full = a(ids)
        e = [(chunked(m, ids.split([3, 1, 2, 1], 1)) - full).abs().max().item() for m in (a, b)]
        print("groups", g, "right", e[0], "wrong", e[1])
        assert e[0] < 1e-4 and (e[1] > 1e-3) == (g == 2)
