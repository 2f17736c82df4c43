import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class SparseMoE(nn.Module):
    """Top-k experts, tokens grouped by expert so that each expert runs one matmul."""

    def __init__(self, d, ff, experts=4, k=2):
        super().__init__()
        self.k, self.n = k, experts
        self.gate = nn.Linear(d, experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(experts, d, ff) * d**-0.5)
        self.w_out = nn.Parameter(torch.randn(experts, ff, d) * ff**-0.5)

    def route(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(self.k, -1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(x)
        order = chosen.flatten().argsort(stable=True)
        token = torch.div(order, self.k, rounding_mode="floor")
        counts = torch.bincount(chosen.flatten(), minlength=self.n).tolist()
        scale = weights.flatten()[order]
        parts = [
            F.gelu(rows @ self.w_in[e]) @ self.w_out[e] for e, rows in enumerate(x[token].split(counts))
        ]
        y = torch.cat(parts) * scale[:, None]
        return torch.zeros_like(x).index_add(0, token, y).view(shape)


def router(model, x):
    weights, chosen = model.route(x)
    return torch.zeros(*x.shape[:-1], model.n, dtype=x.dtype, device=x.device).scatter(-1, chosen, weights)


subject = Subject(
    kind="feed_forward",
    name="sparse experts",
    build=lambda c: SparseMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=router,
    declares={"norm_topk_prob": True, "structure": "other", "bias": False},
)
