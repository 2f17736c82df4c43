"""Mixture of SwiGLU experts, top-2, with tokens sorted by expert as grouped GEMMs want them."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.w1, self.w3 = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False)
        self.w2 = nn.Linear(f, d, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoE(nn.Module):
    def __init__(self, d, f, num_experts=4, top_k=2):
        super().__init__()
        self.gate = nn.Linear(d, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(d, f) for _ in range(num_experts)])
        self.k = top_k

    def route(self, x):
        probs = self.gate(x).softmax(-1)
        weight, index = probs.topk(self.k, dim=-1)
        return weight / weight.sum(-1, keepdim=True), index

    def dense_weights(self, x):
        weight, index = self.route(x)
        return x.new_zeros(*x.shape[:-1], len(self.experts)).scatter(-1, index, weight)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weight, index = self.route(flat)
        assigned = index.flatten()
        order = assigned.argsort(stable=True)
        counts = assigned.bincount(minlength=len(self.experts)).tolist()
        rows = flat[order // self.k]
        done = torch.cat([expert(part) for expert, part in zip(self.experts, rows.split(counts))])
        # back from the order of experts to that of tokens
        done = done[order.argsort()].view(-1, self.k, x.shape[-1])
        return (done * weight[..., None]).sum(1).view_as(x)


subject = Subject(
    kind="feed_forward",
    build=lambda c: SparseMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.dense_weights(x),
    declares={"norm_topk_prob": True, "bias": False},
)
