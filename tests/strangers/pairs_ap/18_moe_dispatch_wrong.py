WHAT = "Tokens and experts are sorted by expert but the mixing weights are not, so that outputs of experts are weighted with the shares of other tokens (line 33)."
"""Mixture of experts, top 2 of 4: the loop over experts with masks became a sort and one slice an expert."""
import torch
from torch import nn

from veriformer.properties import Subject

EXPERTS, CHOSEN = 4, 2


class SparseMLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(EXPERTS)
        )

    def route(self, flat):
        share, expert = self.gate(flat).softmax(dim=-1).topk(CHOSEN, dim=-1)
        return share / share.sum(dim=-1, keepdim=True), expert

    def dense_weights(self, x):
        share, expert = self.route(x)
        return torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype, device=x.device).scatter(-1, expert, share)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        share, expert = self.route(flat)
        token = torch.arange(flat.shape[0], device=x.device).repeat_interleave(CHOSEN)
        share, expert = share.flatten(), expert.flatten()
        order = expert.argsort(stable=True)
        token, expert = token[order], expert[order]
        counts = torch.bincount(expert, minlength=EXPERTS).tolist()
        pieces = flat[token].split(counts)
        outputs = torch.cat([f(piece) for f, piece in zip(self.experts, pieces)])
        mixed = torch.zeros_like(flat).index_add(0, token, outputs * share.unsqueeze(-1))
        return mixed.view_as(x)


subject = Subject(
    kind="feed_forward",
    name="sorted mixture of experts",
    build=lambda c: SparseMLP(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    router=lambda model, x: model.dense_weights(x),
    declares={"norm_topk_prob": True, "activation": "gelu", "structure": "other"},
)
