"""A sparse mixture of experts for a small GPT: the two best of four experts for every token."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(self, n_embd, n_inner):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_embd, n_inner), nn.GELU(), nn.Linear(n_inner, n_embd))

    def forward(self, x):
        return self.net(x)


class TopkRouter(nn.Module):
    def __init__(self, n_embd, num_experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.linear = nn.Linear(n_embd, num_experts, bias=False)

    def forward(self, x):
        logits = self.linear(x)
        probs = F.softmax(logits, dim=1)
        top_probs, indices = probs.topk(self.top_k, dim=-1)
        top_probs = top_probs / top_probs.sum(dim=-1, keepdim=True)
        gates = torch.zeros_like(probs).scatter(-1, indices, top_probs)
        return gates, indices


class SparseMoE(nn.Module):
    def __init__(self, n_embd, n_inner, num_experts=4, top_k=2):
        super().__init__()
        self.router = TopkRouter(n_embd, num_experts, top_k)
        self.experts = nn.ModuleList([Expert(n_embd, n_inner) for _ in range(num_experts)])

    def forward(self, x):
        gates, indices = self.router(x)
        flat_x = x.reshape(-1, x.size(-1))
        flat_gates = gates.reshape(-1, gates.size(-1))
        flat_indices = indices.reshape(-1, indices.size(-1))
        out = torch.zeros_like(flat_x)
        for i, expert in enumerate(self.experts):
            rows = (flat_indices == i).any(dim=-1).nonzero(as_tuple=True)[0]
            if rows.numel() > 0:
                out = out.index_add(0, rows, expert(flat_x[rows]) * flat_gates[rows, i].unsqueeze(-1))
        return out.view_as(x)


subject = Subject(
    kind="feed_forward",
    name="SparseMoE",
    build=lambda c: SparseMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.router(x)[0],
    declares={
        "norm_topk_prob": True,
        "batch_coupled": False,
        "activation": "gelu",
        "bias": True,
        "structure": "other",
        "init": "default",
    },
)
