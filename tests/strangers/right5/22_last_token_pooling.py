WHAT = "classifier on a causal stack that pools the last real token, whichever side the padding is on; the residual is added in place into the output of each projection"
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)

    def rope(self, x):
        T, K = x.shape[-2:]
        f = torch.pow(10000.0, -torch.arange(K // 2, device=x.device, dtype=torch.float64) * 2 / K)
        a = torch.arange(T, device=x.device, dtype=torch.float64)[:, None] * f
        cos, sin = a.cos().to(x.dtype), a.sin().to(x.dtype)
        u, w = x[..., : K // 2], x[..., K // 2 :]
        return torch.cat([u * cos - w * sin, w * cos + u * sin], -1)

    def forward(self, x, seen):
        n = self.n1(x)
        q, k, v = (f(n).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = self.rope(q) @ self.rope(k).mT / k.shape[-1] ** 0.5
        w = s.masked_fill_(~seen, torch.finfo(s.dtype).min).softmax(-1)
        x = self.o((w @ v).transpose(1, 2).flatten(2)).add_(x)
        n = self.n2(x)
        return self.down(F.silu(self.gate(n)) * self.up(n)).add_(x)


class Classifier(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, classes):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d, h, ff) for _ in range(layers))
        self.norm, self.score = nn.RMSNorm(d, eps=1e-6), nn.Linear(d, classes, bias=False)

    def forward(self, ids, mask=None):
        B, T = ids.shape
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        seen = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril() & mask[:, None, None]
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, seen)
        last = (torch.arange(T, device=ids.device) * mask).argmax(1)
        return self.score(self.norm(x[torch.arange(B, device=ids.device), last]))


from veriformer.properties import Subject


def build(c):
    return Classifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="classifier", build=build, forward=forward)
declared = Subject(
    kind="classifier", name="last token", build=build, forward=forward,
    declares={"pooling": "last", "positions": "rotary", "layout": "halves", "norm": "rms",
              "norm_placement": "pre", "final_norm": True, "activation": "swiglu", "bias": False, "output_bias": False,
              "padding_side": "both", "beyond_max_len": "works"},
)
