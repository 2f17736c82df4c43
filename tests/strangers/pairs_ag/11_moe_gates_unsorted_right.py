"""Mixture of experts with sorted dispatch (MegaBlocks style): rows sorted by expert, contiguous slices, scattered back."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

NUM_EXPERTS, TOP_K = 4, 2


class SparseMoE(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.gate = nn.Linear(hidden, NUM_EXPERTS, bias=False)
        self.w_in = nn.Parameter(torch.randn(NUM_EXPERTS, hidden, ffn) / hidden ** 0.5)
        self.w_out = nn.Parameter(torch.randn(NUM_EXPERTS, ffn, hidden) / ffn ** 0.5)

    def route(self, flat):
        probs = self.gate(flat).softmax(-1)
        gates, experts = probs.topk(TOP_K, dim=-1)
        return gates / gates.sum(-1, keepdim=True), experts

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        gates, experts = self.route(flat)
        order = torch.argsort(experts.reshape(-1), stable=True)
        token = order // TOP_K
        counts = torch.bincount(experts.reshape(-1), minlength=NUM_EXPERTS).tolist()
        pieces = [F.relu(rows @ w) @ v for rows, w, v in zip(flat[token].split(counts), self.w_in, self.w_out)]
        expert_out = torch.cat(pieces) * gates.reshape(-1, 1)[order]
        return torch.zeros_like(flat).index_add(0, token, expert_out).view_as(x)

    def dense_gates(self, x):
        gates, experts = self.route(x.reshape(-1, x.shape[-1]))
        out = gates.new_zeros(gates.shape[0], NUM_EXPERTS).scatter(1, experts, gates)
        return out.view(*x.shape[:-1], NUM_EXPERTS)


subject = Subject(
    kind="feed_forward",
    name="sparse MoE",
    build=lambda c: SparseMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.dense_gates(x),
    declares={"norm_topk_prob": True, "activation": "relu", "bias": False},
)
