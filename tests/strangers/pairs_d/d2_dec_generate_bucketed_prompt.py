import math
from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("the prompt is filled up to a multiple of the bucket size before the prefill, and the keys and values of the filling "
        "are left in the cache, so every token that is generated after it attends to them")
PLACE = "generate(): cache not cropped to the prompt's length after the prefill"
BUCKET = 4


def turn(x, pos):
    n = x.size(-1) // 2
    a = pos.to(x)[:, None] * 10000.0 ** (-torch.arange(n).to(x) / n)
    a = torch.cat([a, a], -1)
    return x * a.cos() + torch.cat([-x[..., n:], x[..., :n]], -1) * a.sin()


class Layer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h, self.n1, self.n2 = h, nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up, self.down = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)

    def forward(self, x, pos, kv):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        q, k = turn(q, pos), turn(k, pos)
        if kv:
            k, v = torch.cat([kv[0], k], 2), torch.cat([kv[1], v], 2)
        kv[:] = [k, v]
        s = q @ k.mT / math.sqrt(d // self.h)
        if t > 1:                                                    # a single new token may see all there is
            s = s.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -math.inf)
        x = x + self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
        y = self.n2(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


class Llamaish(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.e, self.n = nn.Embedding(c.vocab_size, c.d_model), nn.RMSNorm(c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, ids, start=0, cache=None):
        x, pos = self.e(ids), torch.arange(start, start + ids.size(1))
        for layer, kv in zip(self.layers, cache or [[] for _ in self.layers]):
            x = layer(x, pos, kv)
        return self.head(self.n(x))


def generator(crop):
    @torch.no_grad()
    def generate(m, tokens, steps, use_cache):
        if not use_cache:
            for _ in range(steps):
                tokens = torch.cat([tokens, m(tokens)[:, -1:].argmax(-1)], 1)
            return tokens
        t, cache = tokens.size(1), [[] for _ in m.layers]
        logits = m(nn.functional.pad(tokens, (0, -t % BUCKET)), 0, cache)[:, t - 1]
        if crop:
            for kv in cache:
                kv[:] = [z[:, :, :t] for z in kv]
        for i in range(steps):
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
            if i + 1 < steps:
                logits = m(tokens[:, -1:], t + i, cache)[:, -1]
        return tokens
    return generate


def _make(crop):
    return Subject(kind="decoder", build=Llamaish, forward=lambda m, tokens: m(tokens), generate=generator(crop),
                   declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "rms",
                             "norm_placement": "pre", "activation": "swiglu", "bias": False},
                   domain={"d_model": [16, 32], "num_heads": [2, 4]})


right, wrong = _make(True), _make(False)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=32, num_heads=4, num_layers=2, d_ff=32, vocab_size=29)
    m = Llamaish(c).eval(); bad = {}
    for t in (4, 5, 6, 8):
        x = torch.randint(0, 29, (8, t)); naive = x
        for _ in range(8):                                           # naive: all over again for each token
            naive = torch.stack([torch.cat([r, m(r[None])[0, -1].argmax()[None]]) for r in naive])
        assert torch.equal(right.generate(m, x, 8, True), naive) and torch.equal(right.generate(m, x, 8, False), naive)
        bad[t] = (wrong.generate(m, x, 8, True) != naive).float().mean().item()
    print("share of tokens that differ, wrong", bad)
    assert bad[4] == bad[8] == 0 and bad[5] > 0.05 and bad[6] > 0.05
