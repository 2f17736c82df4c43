import math
import torch
from torch import nn, einsum
from veriformer.properties import Subject


def get_slopes(n):
    start = 2 ** (-8 / n)
    return torch.tensor([start ** (i + 1) for i in range(n)])


class AlibiAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.register_buffer("slopes", get_slopes(heads), persistent=False)

    def forward(self, x):
        n = x.shape[1]
        q, (k, v) = self.to_q(x), self.to_kv(x).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))
        sim = einsum("b i h d, b j h d -> b h i j", q, k)
        i = torch.arange(n, device=x.device)
        bias = self.slopes.to(x.dtype)[:, None, None] * (i[None, :] - i[:, None])
        sim = sim / math.sqrt(q.shape[-1]) + bias
        sim = sim.masked_fill(i[None, :] > i[:, None], -torch.finfo(sim.dtype).max)
        return self.to_out(einsum("b h i j, b j h d -> b i h d", sim.softmax(-1), v).flatten(2))


class FeedForward(nn.Sequential):
    def __init__(self, dim, inner):
        super().__init__(nn.Linear(dim, inner), nn.GELU(), nn.Linear(inner, dim))


class AlibiLM(nn.Module):
    def __init__(self, *, num_tokens, dim, depth, heads, inner):
        super().__init__()
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(nn.ModuleList([
                nn.LayerNorm(dim), AlibiAttention(dim, heads), nn.LayerNorm(dim), FeedForward(dim, inner)]))
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_tokens, bias=False))

    def forward(self, x):
        x = self.token_emb(x)
        for n1, attn, n2, ff in self.layers:
            x = attn(n1(x)) + x
            x = ff(n2(x)) + x
        return self.to_logits(x)


subject = Subject(
    kind="decoder", name="alibi lm",
    build=lambda c: AlibiLM(num_tokens=c.vocab_size, dim=c.d_model, depth=c.num_layers, heads=c.num_heads, inner=c.d_ff),
    forward=lambda m, tokens: m(tokens), domain={"num_heads": [1, 2, 4]},
    declares={"positions": "alibi", "norm": "layer", "norm_placement": "pre", "final_norm": True, "activation": "gelu"},
)
