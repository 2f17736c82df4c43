"""Mixtral's sparse feed-forward block: two of four experts, their outputs added up by index."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "Outputs of the experts are written, not added, at a token's place: the last expert overwrites the other."
CAUSE = "Of the two experts of a token only the one with the larger index counts: its output overwrites the other's."
EXPERTS, CHOSEN = 4, 2


def add(out, tokens, update):
    return out.index_add(0, tokens, update)


def put(out, tokens, update):
    return out.index_copy(0, tokens, update)


def make(combine):
    class SparseMoeBlock(nn.Module):
        def __init__(self, hidden_dim, ffn_dim):
            super().__init__()
            self.gate = nn.Linear(hidden_dim, EXPERTS, bias=False)
            self.w1 = nn.ModuleList([nn.Linear(hidden_dim, ffn_dim, bias=False) for _ in range(EXPERTS)])
            self.w2 = nn.ModuleList([nn.Linear(ffn_dim, hidden_dim, bias=False) for _ in range(EXPERTS)])

        def route(self, x):
            weights, selected = F.softmax(self.gate(x), dim=-1).topk(CHOSEN, dim=-1)
            return weights / weights.sum(dim=-1, keepdim=True), selected

        def forward(self, hidden_states):
            shape = hidden_states.shape
            x = hidden_states.reshape(-1, shape[-1])
            weights, selected = self.route(x)
            final = torch.zeros_like(x)
            for e in range(EXPERTS):
                tokens, slot = torch.where(selected == e)
                current = self.w2[e](F.gelu(self.w1[e](x[tokens]))) * weights[tokens, slot, None]
                final = combine(final, tokens, current.to(final.dtype))
            return final.reshape(shape)

    return SparseMoeBlock


def router(model, x):
    weights, selected = model.route(x)
    return torch.zeros(*x.shape[:-1], EXPERTS, dtype=weights.dtype, device=x.device).scatter(-1, selected, weights)


def subject(combine):
    block = make(combine)
    return Subject(
        kind="feed_forward",
        name="sparse mixture of experts",
        build=lambda c: block(c.d_model, c.d_ff),
        forward=lambda m, x: m(x),
        router=router,
        declares={"norm_topk_prob": True, "structure": "other"},
    )


right = subject(add)
wrong = subject(put)
