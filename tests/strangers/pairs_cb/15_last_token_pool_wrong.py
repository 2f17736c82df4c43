WHAT = "Pooling of the last real token: its index is the number of real tokens minus one (`mask.sum(1) - 1` in Scorer.forward), which with padding on the left points into the middle of the text or at padding."
"""A scoring endpoint: causal trunk without a head, last token, linear head."""
import torch
from torch import nn

from veriformer.properties import Subject


class Trunk(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.a, self.b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.f, self.g = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, allowed):
        y = self.a(x)
        split = lambda z: z.unflatten(-1, (self.heads, -1))
        s = torch.einsum("bihd,bjhd->bhij", split(self.q(y)), split(self.k(y))) / (x.shape[-1] // self.heads) ** 0.5
        w = s.masked_fill(~allowed[:, None], torch.finfo(s.dtype).min).softmax(-1)
        x = x + self.o(torch.einsum("bhij,bjhd->bihd", w, split(self.v(y))).flatten(2))
        return x + self.g(torch.nn.functional.gelu(self.f(self.b(x)), approximate="tanh"))


class Scorer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Trunk(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.score = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes, bias=False)

    def forward(self, tokens, attention_mask=None):
        B, T = tokens.shape
        mask = torch.ones(B, T, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        x = self.wte(tokens) + self.wpe((mask.long().cumsum(1) - 1).clamp(min=0))
        allowed = torch.ones(T, T, dtype=torch.bool).tril() & mask[:, None]
        for block in self.blocks:
            x = block(x, allowed)
        last = mask.sum(1) - 1
        return self.score(self.norm(x)[torch.arange(B), last])


subject = Subject(
    kind="classifier",
    name="scorer",
    build=Scorer,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"pooling": "last", "padding_side": "both", "positions": "learned", "norm": "layer", "norm_placement": "pre",
              "activation": "gelu_tanh", "output_bias": False},
)
