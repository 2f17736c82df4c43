import math

import torch
from torch import nn

from veriformer.properties import Subject


def get_slopes(n):
    def power_of_2(m):
        start = 2 ** (-(2 ** -(math.log2(m) - 3)))
        return [start ** (i + 1) for i in range(m)]

    if math.log2(n).is_integer():
        return power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_2(closest) + get_slopes(2 * closest)[0::2][: n - closest]


class BloomBlock(nn.Module):
    def __init__(self, dim, heads, inner):
        super().__init__()
        self.heads = heads
        self.input_layernorm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.dense = nn.Linear(dim, dim)
        self.post_attention_layernorm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, dim))
        self.register_buffer("slopes", torch.tensor(get_slopes(heads), dtype=torch.float64)[:, None, None], persistent=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.query_key_value(self.input_layernorm(x)).chunk(3, dim=-1)
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in (q, k, v))
        where = torch.arange(t, device=x.device)
        alibi = (self.slopes * (where[None, :] - where[:, None])).to(x.dtype)
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.heads) + alibi
        scores = scores.masked_fill(where[None, :] > where[:, None], float("-inf"))
        x = x + self.dense((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Bloom(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.h = nn.ModuleList([BloomBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, ids):
        x = self.word_embeddings(ids)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@torch.no_grad()
def sample(model, tokens, steps, temperature=1.0, top_k=None):
    drawn_from = []
    for _ in range(steps):
        logits = model(tokens)[:, -1, :] / temperature
        if top_k is not None:
            best = torch.topk(logits, min(top_k, logits.size(-1))).values
            logits = logits.masked_fill(logits < best.amin(dim=-1, keepdim=True), float("-inf"))
        probabilities = logits.softmax(dim=-1)
        drawn_from.append(probabilities)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], dim=1)
    return tokens, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="BLOOM with top-k sampling",
    build=Bloom,
    forward=lambda m, tokens: m(tokens),
    sampling=sample,
    declares={
        "positions": "alibi",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": False,
        "tied": False,
    },
)
