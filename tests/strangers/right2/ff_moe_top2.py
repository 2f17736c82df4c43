"""Mixtral's experts: 4 of them, each token through its best 2, weights renormalised, no capacity. Unusual: jumps where the
router's order changes, and experts that get no token get no gradient; right, without a capacity no token feels another."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.w1, s.w2, s.w3 = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_ff, c.d_model, bias=False), nn.Linear(c.d_model, c.d_ff, bias=False)

    def forward(s, x):
        return s.w2(F.silu(s.w1(x)) * s.w3(x))


class MoE(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.gate, s.experts = nn.Linear(c.d_model, 4, bias=False), nn.ModuleList(Expert(c) for _ in range(4))

    def forward(s, x):
        flat = x.reshape(-1, x.shape[-1])
        top, which = s.gate(flat).softmax(-1).topk(2, -1)
        top = top / top.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(s.experts):
            rows, slot = (which == e).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * top[rows, slot, None])
        return out.view_as(x)


args = dict(kind="feed_forward", build=MoE, forward=lambda m, x: m(x))
undeclared = Subject(**args)
declared = Subject(**args, declares={"activation": "swiglu", "bias": False, "structure": "other", "batch_coupled": False})
