"""Mixture of experts without padding or capacity: tokens are sorted by expert and each expert takes its run of them."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

EXPERTS, CHOSEN = 4, 2


class SortedExperts(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.w_in = nn.Parameter(torch.randn(EXPERTS, width, inner) / width**0.5)
        self.w_out = nn.Parameter(torch.randn(EXPERTS, inner, width) / inner**0.5)

    def choose(self, flat):
        share, expert = self.gate(flat).softmax(-1).topk(CHOSEN, dim=-1)
        return share / share.sum(-1, keepdim=True), expert

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        share, expert = self.choose(flat)
        order = expert.flatten().argsort(stable=True)
        runs = torch.bincount(expert.flatten(), minlength=EXPERTS).tolist()
        permuted = flat.repeat_interleave(CHOSEN, dim=0)[order]
        done = torch.cat(
            [F.gelu(run @ self.w_in[e]) @ self.w_out[e] for e, run in enumerate(permuted.split(runs))], dim=0
        )
        back = order.argsort()
        restored = done[order].unflatten(0, (-1, CHOSEN))
        return (share[..., None] * restored).sum(1).view_as(x)

    def weights(self, x):
        share, expert = self.choose(x.reshape(-1, x.size(-1)))
        return torch.zeros(share.size(0), EXPERTS, dtype=x.dtype, device=x.device).scatter(1, expert, share).view(
            *x.shape[:-1], EXPERTS
        )


subject = Subject(
    kind="feed_forward",
    build=lambda c: SortedExperts(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    router=lambda model, x: model.weights(x),
    declares={"norm_topk_prob": True, "activation": "gelu", "bias": False, "structure": "other"},
)

WHAT = 'Line 33: Results are put back with the sorting permutation itself, not with its inverse (`back`): from a few tokens on, tokens get what experts made of other tokens.'
