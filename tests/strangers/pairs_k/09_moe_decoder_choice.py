"""A decoder with a mixture of experts in every layer."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "Experts choose their tokens over the whole sequence (expert choice), which in a causal decoder lets the future in."
CAUSE = (
    "Future tokens influence earlier outputs through the router: each expert takes its top tokens among all positions of "
    "the sequence, so later tokens decide whether an earlier one is taken."
)


def token_choice(probabilities, k):
    """Each token takes its best k experts: weights [B, T, E]."""
    best, index = probabilities.topk(k, dim=-1)
    return torch.zeros_like(probabilities).scatter(-1, index, best / best.sum(-1, keepdim=True))


def expert_choice(probabilities, k):
    """Each expert takes its best tokens, of which there are k / E (Zhou et al. 2022): the load is balanced."""
    T, E = probabilities.shape[1:]
    capacity = min(T, math.ceil(T * k / E))
    best, index = probabilities.topk(capacity, dim=1)
    return torch.zeros_like(probabilities).scatter(1, index, best)


def make(choose):
    class Expert(nn.Sequential):
        def __init__(self, d, f):
            super().__init__(nn.Linear(d, f), nn.SiLU(), nn.Linear(f, d))

    class SparseMoE(nn.Module):
        def __init__(self, d, f, experts=4, k=2):
            super().__init__()
            self.gate = nn.Linear(d, experts, bias=False)
            self.experts = nn.ModuleList([Expert(d, f) for _ in range(experts)])
            self.k = k

        def forward(self, x):
            weights = choose(self.gate(x).softmax(-1), self.k)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                b, t = weights[..., e].nonzero(as_tuple=True)
                out = out.index_put((b, t), (expert(x[b, t]) * weights[b, t, e, None]).to(x.dtype), accumulate=True)
            return out

    class Block(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.n1, self.n2 = nn.RMSNorm(c.d_model), nn.RMSNorm(c.d_model)
            self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model, bias=False), nn.Linear(c.d_model, c.d_model, bias=False)
            self.moe = SparseMoE(c.d_model, c.d_ff)
            self.h = c.num_heads

        def forward(self, x):
            q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.moe(self.n2(x))

    class MoEDecoder(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
            self.blocks = nn.ModuleList([Block(c) for _ in range(c.num_layers)])
            self.norm, self.head = nn.RMSNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

        def forward(self, tokens):
            x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return MoEDecoder


def subject(choose):
    return Subject(kind="decoder", name="MoE decoder", build=make(choose), forward=lambda m, tokens: m(tokens))


right = subject(token_choice)
wrong = subject(expert_choice)
