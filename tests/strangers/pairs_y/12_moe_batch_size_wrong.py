WHAT = "Experts take at most ceil(k * tokens / experts) tokens of the whole batch at inference too and drop the rest, so that outputs change with the batch and with what follows (line 39)."
import math

import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import DrawnConfig, Subject

EXPERTS, TOP_K = 4, 2


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoE(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(EXPERTS))

    def route(self, x):
        """The two best experts of each token, weights that sum to one: [..., E]."""
        best, chosen = self.gate(x).topk(TOP_K, dim=-1)
        return torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype, device=x.device).scatter(
            -1, chosen, best.softmax(dim=-1)
        )

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights = self.route(flat)
        capacity = math.ceil(TOP_K * flat.shape[0] / EXPERTS)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = weights[:, number].nonzero().squeeze(-1)[:capacity]
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, number, None])
        return out.view_as(x)


class MixtralLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.moe = SparseMoE(dim, hidden)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.wqkv(self.attention_norm(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(B, T, D))
        return x + self.moe(self.ffn_norm(x))


class Mixtral(nn.Module):
    def __init__(self, vocab, max_len, dim, heads, layers, hidden):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList(MixtralLayer(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


subject = Subject(
    kind="decoder",
    name="a mixture of experts",
    build=lambda c: Mixtral(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens),
    router=lambda model, x: model.layers[0].moe.route(x),
    declares={"positions": "learned", "norm": "rms", "norm_placement": "pre", "norm_topk_prob": True},
)
