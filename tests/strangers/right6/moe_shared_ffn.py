"""Experts of SwiGLU: the best two of four, weights renormalised, one shared expert; tokens sorted by expert."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class SparseExperts(nn.Module):
    def __init__(self, d, f, experts=4, top=2):
        super().__init__()
        self.experts, self.top = experts, top
        self.gate = nn.Linear(d, experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(experts, d, 2 * f) * d**-0.5)
        self.w_out = nn.Parameter(torch.randn(experts, f, d) * f**-0.5)
        self.shared_in, self.shared_out = nn.Linear(d, 2 * f, bias=False), nn.Linear(f, d, bias=False)

    def choose(self, x):
        share = self.gate(x).softmax(-1)
        value, index = share.topk(self.top, -1)
        return value / value.sum(-1, keepdim=True), index

    def router(self, x):
        value, index = self.choose(x)
        return torch.zeros(*x.shape[:-1], self.experts, dtype=x.dtype, device=x.device).scatter(-1, index, value)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        value, index = self.choose(flat)
        slot = index.flatten()
        order = slot.argsort(stable=True)
        token = order // self.top
        counts = torch.bincount(slot, minlength=self.experts).tolist()
        done = []
        for e, rows in enumerate(flat[token].split(counts)):
            gate, up = (rows @ self.w_in[e]).chunk(2, -1)
            done.append((F.silu(gate) * up) @ self.w_out[e])
        routed = torch.cat(done) * value.flatten()[order, None]
        gate, up = self.shared_in(flat).chunk(2, -1)
        out = self.shared_out(F.silu(gate) * up)
        return out.index_add(0, token, routed).view_as(x)


def build(c: DrawnConfig):
    return SparseExperts(c.d_model, c.d_ff)


def forward(model, x):
    return model(x)


declared = Subject(
    kind="feed_forward", name="experts with a shared one", build=build, forward=forward,
    router=lambda model, x: model.router(x),
    declares={
        "activation": "swiglu", "bias": False, "norm_topk_prob": True, "batch_coupled": False, "residual": False,
        "structure": "other",
    },
)
undeclared = Subject(kind="feed_forward", build=build, forward=forward)
