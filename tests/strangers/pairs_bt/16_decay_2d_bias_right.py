"""Groups for AdamW of a GPT written with einsum: matrices decay, biases and gains do not."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, D, H):
        super().__init__()
        K = D // H
        self.q_weight, self.k_weight, self.v_weight = (nn.Parameter(torch.randn(D, H, K) * 0.02) for _ in range(3))
        self.q_bias, self.k_bias, self.v_bias = (nn.Parameter(torch.zeros(H, K)) for _ in range(3))
        self.o_weight = nn.Parameter(torch.randn(H, K, D) * 0.02)
        self.o_bias = nn.Parameter(torch.zeros(D))

    def forward(self, x):
        q = torch.einsum("btd,dhk->bhtk", x, self.q_weight) + self.q_bias[:, None]
        k = torch.einsum("btd,dhk->bhtk", x, self.k_weight) + self.k_bias[:, None]
        v = torch.einsum("btd,dhk->bhtk", x, self.v_weight) + self.v_bias[:, None]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.einsum("bhtk,hkd->btd", y, self.o_weight) + self.o_bias


class Block(nn.Module):
    def __init__(self, D, H, M):
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(D), Attention(D, H)
        self.norm_2, self.mlp = nn.LayerNorm(D), nn.Sequential(nn.Linear(D, M), nn.GELU(), nn.Linear(M, D))

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, V, D, H, L, M, N):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(N, D)
        self.blocks = nn.ModuleList([Block(D, H, M) for _ in range(L)])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parameter_groups(model, weight_decay=0.1):
    decay, rest = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            matrix = p.dim() >= 2 and not name.endswith("bias")
            (decay if matrix else rest).append(p)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="AdamW groups of the einsum GPT",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m: parameter_groups(m),
)
