"""Mixture of experts as serving engines run it: (token, choice) pairs sorted by expert, one dense product an expert, scattered back."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

EXPERTS, TOP_K = 4, 2


class SortedExperts(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.gate = nn.Linear(d_model, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, d_model, d_ff) / d_model**0.5)
        self.w3 = nn.Parameter(torch.randn(EXPERTS, d_model, d_ff) / d_model**0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, d_ff, d_model) / d_ff**0.5)

    def route(self, x):
        p, chosen = self.gate(x).softmax(-1).topk(TOP_K, dim=-1)
        return p / p.sum(-1, keepdim=True), chosen

    def mixture(self, x):
        p, chosen = self.route(x)
        return x.new_zeros(*x.shape[:-1], EXPERTS).scatter(-1, chosen, p)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        p, chosen = self.route(flat)
        order = chosen.flatten().argsort(stable=True)
        source = order // TOP_K
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        done = []
        for e, rows in enumerate(flat[source].split(counts)):
            done.append((F.silu(rows @ self.w1[e]) * (rows @ self.w3[e])) @ self.w2[e])
        done = torch.cat(done) * p.flatten()[:, None]
        return torch.zeros_like(flat).index_add(0, source, done).view_as(x)


subject = Subject(
    kind="feed_forward",
    name="experts, sorted",
    build=lambda c: SortedExperts(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.mixture(x),
    declares={"norm_topk_prob": True, "bias": False},
)
WHAT = 'The outputs stand in the order of the experts, the weights that multiply them still in the order of the tokens (line 36): a token is mixed with weights of other tokens, which depend on the batch.'
