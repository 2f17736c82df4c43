"""A mixture of experts as it is served: rows sorted by expert, one product for each expert's run of rows."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "What the experts give, sorted by expert, is brought back with the sorting permutation itself in place of its inverse."
CAUSE = (
    "The outputs stand in sorted order and are gathered by `order`, where they have to be scattered to it (or gathered by argsort(order)): "
    "tokens get other tokens' expert outputs, depending on how all tokens of the batch are routed. A token alone is right."
)
EXPERTS, CHOSEN = 4, 2


class SortedExperts(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS, bias=False)
        self.w_in = nn.Parameter(torch.randn(EXPERTS, dim, hidden) * dim**-0.5)
        self.w_out = nn.Parameter(torch.randn(EXPERTS, hidden, dim) * hidden**-0.5)

    def route(self, rows):
        """Weights and experts `[N, k]`; the weights of a token sum to one."""
        weight, expert = self.gate(rows).softmax(-1).topk(CHOSEN, dim=-1)
        return weight / weight.sum(-1, keepdim=True), expert

    def unsort(self, rows, order):
        return torch.zeros_like(rows).index_copy(0, order, rows)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        weight, expert = self.route(rows)
        expert = expert.flatten()  # slot s is choice s % k of token s // k
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=EXPERTS).tolist()
        runs = rows[order // CHOSEN].split(counts)
        done = [nn.functional.silu(run @ w_in) @ w_out for run, w_in, w_out in zip(runs, self.w_in, self.w_out)]
        slots = self.unsort(torch.cat(done), order).view(len(rows), CHOSEN, -1)
        return (slots * weight[..., None]).sum(1).view_as(x)


class GatheredExperts(SortedExperts):
    def unsort(self, rows, order):
        return rows[order]


def router(model, x):
    weight, expert = model.route(x.reshape(-1, x.shape[-1]))
    full = weight.new_zeros(len(weight), EXPERTS).scatter(1, expert, weight)
    return full.view(*x.shape[:-1], EXPERTS)


def subject(cls):
    return Subject(
        kind="feed_forward",
        name="sorted experts",
        build=lambda c: cls(c.d_model, c.d_ff),
        forward=lambda m, x: m(x),
        router=router,
        declares={"norm_topk_prob": True},
    )


right, wrong = subject(SortedExperts), subject(GatheredExperts)
