WHAT = 'the outputs of experts stand in sorted order but are multiplied by gates gathered with the inverse permutation (order.argsort()) instead of order: tokens get the routing weights of other tokens, and of their other choice (line 34)'
"""Decoder with a mixture of experts, dispatched by sorting the (token, expert) assignments."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

EXPERTS, TOP_K = 4, 2


class SortedMoE(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(EXPERTS)
        )

    def route(self, x):
        probs = F.softmax(self.gate(x), dim=-1)
        weights, chosen = probs.topk(TOP_K, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        slots = chosen.flatten()  # slot n * TOP_K + j: choice j of token n
        order = slots.argsort(stable=True)
        counts = torch.bincount(slots, minlength=EXPERTS).tolist()
        token = order // TOP_K
        outputs = [expert(part) for expert, part in zip(self.experts, flat[token].split(counts))]
        gates = weights.flatten()[order.argsort()]
        mixed = torch.cat(outputs) * gates[:, None]
        out = torch.zeros_like(flat).index_add(0, token, mixed.to(flat.dtype))
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.moe = SortedMoE(dim, hidden)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.moe(self.ln2(x))


class MoEGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def router(model, x):
    weights, chosen = model.blocks[0].moe.route(x)
    return torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype, device=x.device).scatter(-1, chosen, weights)


subject = Subject(
    kind="decoder",
    name="sorted MoE",
    build=MoEGPT,
    forward=lambda model, tokens: model(tokens),
    router=router,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "structure": "other",
        "norm_topk_prob": True,
        "tied": False,
    },
)
