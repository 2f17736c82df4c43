"""A small LLaMA and its sampler."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x):
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float64) / half
    angles = torch.arange(x.shape[-2], device=x.device).double()[:, None] * 10000.0**-steps
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        if dim // heads % 2:
            raise ValueError("heads must be of even width")
        self.heads = heads
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))

    @torch.no_grad()
    def sample(self, tokens, steps, temperature=1.0, top_k=None):
        drawn_from = []
        for _ in range(steps):
            logits = self(tokens)[:, -1] / temperature
            if top_k is not None and top_k < logits.shape[-1]:
                ranked = logits.sort(-1, descending=True).values
                threshold = ranked[:, top_k - 1, None]
                logits = logits.masked_fill(logits < threshold, float("-inf"))
            probs = logits.softmax(-1)
            drawn_from.append(probs)
            tokens = torch.cat((tokens, torch.multinomial(probs, 1)), 1)
        return tokens, torch.stack(drawn_from, 1)


subject = Subject(
    kind="decoder",
    name="LLaMA with a sampler",
    build=lambda c: Llama(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    sampling=lambda m, tokens, steps, temperature=1.0, top_k=None: m.sample(tokens, steps, temperature, top_k),
    declares={
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "activation": "swiglu",
        "bias": False,
    },
)
