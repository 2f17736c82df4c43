"""zoo/PR 188: mixture of experts with a grouped product. (token, choice) pairs are sorted by expert, each expert gets
one contiguous slice, and what comes out is put back in the order of the tokens."""

import torch
from torch import Tensor, nn

from veriformer.properties import Subject

WHAT = "What the experts give is put back by indexing with the sorting order, not with its inverse."
CAUSE = (
    "The un-permutation of the sorted dispatch uses `order` where `argsort(order)` is right, so tokens receive what "
    "experts computed for other tokens, also for later ones and for those of other samples in the batch."
)


def unsort(rows: Tensor, order: Tensor) -> Tensor:
    return rows[torch.argsort(order)]


def unsort_forwards(rows: Tensor, order: Tensor) -> Tensor:
    return rows[order]


class Expert(nn.Sequential):
    def __init__(self, d: int, d_ff: int) -> None:
        super().__init__(nn.Linear(d, d_ff), nn.SiLU(), nn.Linear(d_ff, d))


class GroupedMoE(nn.Module):
    def __init__(self, d: int, d_ff: int, restore, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(Expert(d, d_ff) for _ in range(experts))
        self.top_k, self.restore = top_k, restore

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.size(-1))
        probs, chosen = self.gate(flat).softmax(-1).topk(self.top_k, dim=-1)  # [N, k]
        probs = probs / probs.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)  # pairs, sorted by expert
        rows = flat[order // self.top_k]
        sizes = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        done = torch.cat([expert(part) for expert, part in zip(self.experts, rows.split(sizes), strict=True)])
        pairs = self.restore(done, order).view(-1, self.top_k, x.size(-1))
        return (pairs * probs[..., None]).sum(1).view_as(x)


class Block(nn.Module):
    def __init__(self, d: int, heads: int, d_ff: int, restore) -> None:
        super().__init__()
        self.heads = heads
        self.pre_attention, self.pre_moe = nn.LayerNorm(d), nn.LayerNorm(d)
        self.wq, self.wkv, self.wo = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.moe = GroupedMoE(d, d_ff, restore)

    def attend(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q = self.wq(x).view(B, T, self.heads, -1).transpose(1, 2)
        k, v = self.wkv(x).view(B, T, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.pre_attention(x))
        return x + self.moe(self.pre_moe(x))


class SparseGPT(nn.Module):
    def __init__(self, c, restore) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.places = nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, restore) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.logits = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def subject(name: str, restore) -> Subject:
    return Subject(
        kind="decoder",
        name=name,
        build=lambda c: SparseGPT(c, restore),
        forward=lambda m, tokens: m(tokens),
        declares={"structure": "other", "norm_topk_prob": True, "batch_coupled": False},
    )


right = subject("SparseGPT", unsort)
wrong = subject("SparseGPT, restored by order", unsort_forwards)
