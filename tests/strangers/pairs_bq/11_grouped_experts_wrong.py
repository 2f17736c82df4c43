WHAT = 'The combine weights of the experts stay in the order of the tokens (`gates.flatten()`) while the rows they multiply are sorted by expert: they are not permuted by `order`, so rows are mixed by the gates of other tokens (line 37).'
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class GroupedExperts(nn.Module):
    """Top-k experts; the (token, choice) rows are sorted by expert, so that each expert has one product."""

    def __init__(self, d_model, d_ff, num_experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(d_model, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, d_model, d_ff) * d_model**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, d_ff, d_model) * d_ff**-0.5)

    def route(self, x):
        values, chosen = self.gate(x).softmax(-1).topk(self.top_k, dim=-1)
        return values / values.sum(-1, keepdim=True), chosen

    def dense_weights(self, x):
        gates, chosen = self.route(x)
        return gates.new_zeros(*x.shape[:-1], self.up.shape[0]).scatter(-1, chosen, gates)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        gates, chosen = self.route(flat)
        order = chosen.flatten().argsort(stable=True)
        source = order // self.top_k
        counts = chosen.flatten().bincount(minlength=self.up.shape[0]).tolist()
        pieces = []
        for expert, rows in enumerate(flat[source].split(counts)):
            pieces.append(F.gelu(rows @ self.up[expert]) @ self.down[expert])
        rows = torch.cat(pieces)
        rows = rows * gates.flatten()[:, None]
        return torch.zeros_like(flat).index_add(0, source, rows).view_as(x)


subject = Subject(
    kind="feed_forward",
    name="grouped experts",
    build=lambda c: GroupedExperts(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.dense_weights(x),
    declares={"activation": "gelu", "bias": False, "norm_topk_prob": True, "structure": "other"},
)
