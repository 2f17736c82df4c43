WHAT = "BitNet: ternary weights with a straight-through gradient and a norm inside each linear map; the class token stands behind the padding, without a position; a tuple comes out"
import torch
from torch import nn
from torch.nn import functional as F


class Ternary(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * n_in**-0.5)
        self.norm = nn.RMSNorm(n_in, eps=1e-6)

    def forward(self, x):
        scale = self.weight.abs().mean().clamp(min=1e-5)
        rounded = (self.weight / scale).round().clamp(-1, 1) * scale
        return F.linear(self.norm(x), self.weight + (rounded - self.weight).detach())


class Layer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (Ternary(d, d) for _ in range(4))
        self.up, self.down = Ternary(d, ff), Ternary(ff, d)

    def forward(self, x, seen):
        q, k, v = (f(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, torch.finfo(q.dtype).min)
        x = x + self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(x)) ** 2)


class Classifier(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, max_len, classes):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.cls = nn.Parameter(torch.randn(d))
        self.layers = nn.ModuleList(Layer(d, h, ff) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(d, eps=1e-6), nn.Linear(d, classes)

    def forward(self, ids, mask=None):
        B, T = ids.shape
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        x = self.tokens(ids) + self.places((mask.long().cumsum(1) - 1).clamp(min=0))
        x = torch.cat([x, self.cls.expand(B, 1, -1)], 1)
        seen = F.pad(mask, (0, 1), value=True)[:, None, None]
        for layer in self.layers:
            x = layer(x, seen)
        x = self.norm(x)
        return self.head(x[:, -1]), x[:, :-1]


from veriformer.properties import Subject


def build(c):
    return Classifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)[0]


undeclared = Subject(kind="classifier", build=build, forward=forward)
declared = Subject(
    kind="classifier", name="ternary", build=build, forward=forward,
    declares={"pooling": "cls", "quantised": True, "positions": "learned", "norm": "rms",
              "norm_placement": "other", "final_norm": True, "activation": "other", "bias": False, "output_bias": True,
              "structure": "other", "padding_side": "both", "beyond_max_len": "error"},
)
