"""A small Mixtral whose experts run grouped: (token, choice) pairs are sorted by expert, computed in slices, put back."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

EXPERTS, TOP_K = 4, 2


def put_back_right(sorted_rows, order):
    rows = torch.empty_like(sorted_rows)
    return rows.index_copy(0, order, sorted_rows)


def put_back_wrong(sorted_rows, order):
    return sorted_rows[order]


class SparseMoe(nn.Module):
    def __init__(self, dim, hidden, put_back):
        super().__init__()
        self.put_back = put_back
        self.gate = nn.Linear(dim, EXPERTS, bias=False)
        self.w1 = nn.ModuleList(nn.Linear(dim, hidden, bias=False) for _ in range(EXPERTS))
        self.w2 = nn.ModuleList(nn.Linear(hidden, dim, bias=False) for _ in range(EXPERTS))
        self.w3 = nn.ModuleList(nn.Linear(dim, hidden, bias=False) for _ in range(EXPERTS))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        scores, chosen = self.gate(flat).topk(TOP_K, dim=-1)
        weights = scores.softmax(dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        groups = flat[order // TOP_K].split(counts)
        done = [w2(F.silu(w1(g)) * w3(g)) for g, w1, w2, w3 in zip(groups, self.w1, self.w2, self.w3)]
        rows = self.put_back(torch.cat(done), order).view(-1, TOP_K, x.shape[-1])
        return (rows * weights[..., None]).sum(1).view_as(x)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        if self.head_dim % 2:
            raise ValueError("rotary wants an even width")
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def rotate(self, x):
        half = self.head_dim // 2
        freqs = 10000.0 ** (-torch.arange(half, device=x.device) / half)
        angle = torch.arange(x.shape[-2], device=x.device)[:, None] * freqs
        cos, sin, (a, b) = angle.cos().to(x.dtype), angle.sin().to(x.dtype), x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, x):
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Mixtral(nn.Module):
    def __init__(self, c, put_back):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.attention = nn.ModuleList(Attention(c.d_model, c.num_heads) for _ in range(c.num_layers))
        self.moe = nn.ModuleList(SparseMoe(c.d_model, c.d_ff, put_back) for _ in range(c.num_layers))
        self.norms = nn.ModuleList(nn.RMSNorm(c.d_model, eps=1e-5) for _ in range(2 * c.num_layers + 1))
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for i, (attention, moe) in enumerate(zip(self.attention, self.moe)):
            h = h + attention(self.norms[2 * i](h))
            h = h + moe(self.norms[2 * i + 1](h))
        return self.output(self.norms[-1](h))


def subject(put_back):
    return Subject(
        kind="decoder",
        name="grouped Mixtral",
        build=lambda c: Mixtral(c, put_back),
        forward=lambda m, tokens: m(tokens),
        declares={"positions": "rotary", "norm": "rms"},
    )


right, wrong = subject(put_back_right), subject(put_back_wrong)
WHAT = "The rows that the experts computed in sorted order are brought back by indexing with the sorting permutation instead of its inverse."
CAUSE = (
    "After the grouped expert computation the un-sort applies argsort once more (rows[order]) where it should scatter to it: tokens get the "
    "expert outputs of other tokens, later ones and those of other samples among them."
)
