WHAT = "Perceiver IO: 5 latents read the tokens, work among themselves, and every position reads the latents: tokens never attend to tokens directly"
import torch
from torch import nn

LATENTS = 5


class Read(nn.Module):
    """x attends to y, then a feed-forward, both pre-norm with residuals."""

    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.nx, self.ny, self.nf = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.GELU(), nn.Linear(ff, d))

    def forward(self, x, y, mask=None):
        split = lambda t: t.unflatten(-1, (self.h, -1)).transpose(1, 2)  # noqa: E731
        a, b = self.nx(x), self.ny(y)
        q, k, v = split(self.q(a)), split(self.k(b)), split(self.v(b))
        s = torch.einsum("bhik,bhjk->bhij", q, k) / q.shape[-1] ** 0.5
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None], torch.finfo(s.dtype).min)
        x = x + self.o(torch.einsum("bhij,bhjk->bihk", s.softmax(-1), v).flatten(2))
        return x + self.ff(self.nf(x))


class Perceiver(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, max_len):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.latents = nn.Parameter(torch.randn(LATENTS, d) * 0.5)
        self.encode, self.decode = Read(d, h, ff), Read(d, h, ff)
        self.process = nn.ModuleList(Read(d, h, ff) for _ in range(layers))
        self.norm = nn.LayerNorm(d)

    def forward(self, ids, mask=None):
        B, T = ids.shape
        at = torch.arange(T, device=ids.device).expand(B, T)
        if mask is not None:
            at = (mask.long().cumsum(1) - 1).clamp(min=0)
        x = self.tokens(ids) + self.places(at)
        z = self.encode(self.latents.expand(B, -1, -1), x, mask)
        for layer in self.process:
            z = layer(z, z)
        return self.norm(self.decode(x, z))


from veriformer.properties import Subject


def build(c):
    return Perceiver(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="encoder", build=build, forward=forward)
declared = Subject(
    kind="encoder", name="perceiver io", build=build, forward=forward,
    declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "gelu", "structure": "other", "padding_side": "both", "beyond_max_len": "error"},
)
