"""A Llama-like decoder; tokens are drawn with the Gumbel trick, as a port from JAX has it."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_heads
        self.attention_norm, self.ffn_norm = RMSNorm(c.d_model), RMSNorm(c.d_model)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(c.d_model, c.d_model, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(c.d_model, c.d_ff, bias=False) for _ in range(2))
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x):
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(h.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.positions = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.d_model)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens) + self.positions.weight[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def gumbel(like):
    """Standard Gumbel noise: -log of an exponential variable."""
    return -torch.empty_like(like).exponential_().log()


@torch.no_grad()
def sample(model, tokens, steps, temperature=1.0, top_k=None):
    drawn_from = []
    for _ in range(steps):
        logits = model(tokens)[:, -1]
        if top_k is not None:
            least = logits.topk(min(top_k, logits.size(-1)), dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        drawn_from.append((logits / temperature).softmax(-1))
        choice = ((logits + gumbel(logits)) / temperature).argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, choice), dim=1)
    return tokens, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    build=Llama,
    forward=lambda model, tokens: model(tokens),
    sampling=sample,
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "rms",
        "norm_placement": "pre",
        "activation": "swiglu",
        "bias": False,
    },
)

WHAT = 'Line 67: The temperature divides the sum of logits and noise, which does not move the argmax: tokens are drawn at temperature 1 whatever temperature is asked for.'
