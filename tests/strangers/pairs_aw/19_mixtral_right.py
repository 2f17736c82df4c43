"""Mixtral's sparse block of experts: the two best of four, weights of the chosen divided by their sum."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class BlockSparseTop2MLP(nn.Module):
    def __init__(self, hidden_dim, ffn_dim):
        super().__init__()
        self.w1 = nn.Linear(hidden_dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, hidden_dim, bias=False)
        self.w3 = nn.Linear(hidden_dim, ffn_dim, bias=False)

    def forward(self, hidden_states):
        return self.w2(F.silu(self.w1(hidden_states)) * self.w3(hidden_states))


class MixtralSparseMoeBlock(nn.Module):
    def __init__(self, hidden_dim, ffn_dim, num_experts=4, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(hidden_dim, num_experts, bias=False)
        self.experts = nn.ModuleList([BlockSparseTop2MLP(hidden_dim, ffn_dim) for _ in range(num_experts)])

    def route(self, flat):
        probabilities = F.softmax(self.gate(flat), dim=1)
        routing_weights, selected_experts = torch.topk(probabilities, self.top_k, dim=-1)
        return routing_weights / routing_weights.sum(dim=-1, keepdim=True), selected_experts

    def forward(self, hidden_states):
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        flat = hidden_states.reshape(-1, hidden_dim)
        routing_weights, selected_experts = self.route(flat)
        final = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(selected_experts == index)
            if token.numel() == 0:
                continue
            current = expert(flat[token]) * routing_weights[token, slot, None]
            final.index_add_(0, token, current)
        return final.reshape(batch_size, sequence_length, hidden_dim)


def router(model, x):
    weights, chosen = model.route(x.reshape(-1, x.shape[-1]))
    dense = torch.zeros(*weights.shape[:-1], model.num_experts, dtype=weights.dtype, device=weights.device)
    return dense.scatter(1, chosen, weights).view(*x.shape[:2], -1)


subject = Subject(
    kind="feed_forward",
    name="Mixtral experts",
    build=lambda c: MixtralSparseMoeBlock(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=router,
    declares={"activation": "swiglu", "norm_topk_prob": True, "bias": False, "structure": "other"},
)
