"""Mixture of experts: the loop over tokens was replaced by a sort, so that each expert runs once on what it is given."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class SparseMoE(nn.Module):
    def __init__(self, hidden_dim, ffn_dim, num_experts=4, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(hidden_dim, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden_dim, ffn_dim), nn.GELU(), nn.Linear(ffn_dim, hidden_dim))
            for _ in range(num_experts)
        )

    def route(self, x):
        """Weights and experts [N, top_k] of tokens [N, D]; the weights of a token sum to 1."""
        probabilities = F.softmax(self.gate(x), dim=-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weights, chosen = self.route(x)

        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        token = order // self.top_k
        counts = torch.bincount(flat, minlength=self.num_experts).tolist()
        pieces = x[token].split(counts)
        results = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces)])

        results = results * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, token, results).view(shape)


def router(model, x):
    weights, chosen = model.route(x)
    return torch.zeros(*x.shape[:-1], model.num_experts, dtype=x.dtype).scatter(-1, chosen, weights)


subject = Subject(
    kind="feed_forward",
    name="mixture of experts, sorted",
    build=lambda c: SparseMoE(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    router=router,
    declares={"norm_topk_prob": True, "structure": "other", "bias": True},
)
