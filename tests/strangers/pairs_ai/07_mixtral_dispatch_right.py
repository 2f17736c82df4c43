"""A sparse mixture of experts whose tokens are sorted by expert, so that each expert works on one slice."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

EXPERTS, TOP_K = 4, 2


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False), nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoE(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(EXPERTS))

    def route(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(TOP_K, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        # one row for every (token, expert) pair, in the order of the experts
        slots = chosen.flatten()
        order = slots.argsort(stable=True)
        counts = slots.bincount(minlength=EXPERTS).tolist()
        rows = flat[order // TOP_K]
        done = torch.cat([expert(part) for expert, part in zip(self.experts, rows.split(counts))])
        # back to the order of the tokens
        done = done[order.argsort()].view(-1, TOP_K, x.shape[-1])
        return (done * weights[..., None]).sum(1).view_as(x)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.moe = SparseMoE(dim, hidden)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.moe(self.ln2(x))


class MixtureLM(nn.Module):
    def __init__(self, vocab, dim, heads, hidden, layers, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, hidden) for _ in range(layers)))
        self.ln, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.ln(self.blocks(x)))


def router(model, x):
    weights, chosen = model.blocks[0].moe.route(x)
    return torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype, device=x.device).scatter(-1, chosen, weights)


subject = Subject(
    kind="decoder",
    name="MixtureLM",
    build=lambda c: MixtureLM(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len),
    forward=lambda m, tokens: m(tokens),
    router=router,
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "norm_topk_prob": True,
        "structure": "other",
    },
)
