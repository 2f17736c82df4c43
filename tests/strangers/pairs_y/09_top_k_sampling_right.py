import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import DrawnConfig, Subject


class GemmaNorm(nn.Module):
    """RMSNorm whose gain is 1 + weight."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.weight)


def rope(x):
    half = x.shape[-1] // 2
    steps = torch.arange(x.shape[-2], device=x.device, dtype=torch.float64)
    angle = steps[:, None] / 10000 ** (torch.arange(half, device=x.device, dtype=torch.float64) / half)
    c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.split(half, -1)
    return torch.cat((first * c - second * s, second * c + first * s), -1)


class GemmaLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        kv = c.num_key_value_heads * c.d_head
        self.pre_attention, self.pre_mlp = GemmaNorm(c.d_model), GemmaNorm(c.d_model)
        self.q = nn.Linear(c.d_model, c.d_model, bias=False)
        self.k, self.v = nn.Linear(c.d_model, kv, bias=False), nn.Linear(c.d_model, kv, bias=False)
        self.o = nn.Linear(c.d_model, c.d_model, bias=False)
        self.gate, self.up = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x):
        c, h = self.c, self.pre_attention(x)
        q = rope(self.q(h).unflatten(-1, (c.num_heads, c.d_head)).transpose(1, 2))
        k = rope(self.k(h).unflatten(-1, (c.num_key_value_heads, c.d_head)).transpose(1, 2))
        v = self.v(h).unflatten(-1, (c.num_key_value_heads, c.d_head)).transpose(1, 2)
        group = c.num_heads // c.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) / c.d_head**0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        y = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.pre_mlp(x)
        return x + self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h))


class Gemma(nn.Module):
    def __init__(self, c):
        super().__init__()
        if c.d_head % 2:
            raise ValueError("d_head must be even")
        self.embedder = nn.Embedding(c.vocab_size, c.d_model)
        nn.init.normal_(self.embedder.weight, std=c.d_model**-0.5)
        self.layers = nn.ModuleList(GemmaLayer(c) for _ in range(c.num_layers))
        self.final_norm = GemmaNorm(c.d_model)

    def forward(self, tokens):
        x = self.embedder(tokens) * self.embedder.embedding_dim**0.5
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.final_norm(x), self.embedder.weight)


@torch.no_grad()
def sample(model, tokens, steps, temperature=1.0, top_k=None):
    distributions = []
    for _ in range(steps):
        logits = model(tokens)[:, -1] / temperature
        kept = logits
        if top_k is not None:
            best, where = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
            kept = torch.full_like(logits, float("-inf")).scatter(-1, where, best)
        chosen = torch.multinomial(kept.softmax(-1), num_samples=1)
        distributions.append(kept.softmax(-1))
        tokens = torch.cat((tokens, chosen), dim=1)
    return tokens, torch.stack(distributions, dim=1)


subject = Subject(
    kind="decoder",
    name="Gemma",
    build=Gemma,
    forward=lambda model, tokens: model(tokens),
    sampling=sample,
    declares={
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "embedding_scale": True,
        "grouped_queries": True,
        "tied": True,
    },
)
