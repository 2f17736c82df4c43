WHAT = 'Tokens that took an expert as their second choice are weighted with the weight of their first choice: the slot found by torch.where is not used as index (line 40).'
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class SparseMoE(nn.Module):
    """Mixtral-style block: top-2 of 4 experts, weights renormalised over the chosen."""

    def __init__(self, d_model, d_ff, num_experts=4, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(d_model, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(d_model, d_ff) for _ in range(num_experts)])

    def route(self, flat):
        probs = self.gate(flat).softmax(-1)
        topw, topi = probs.topk(self.top_k, dim=-1)
        return topw / topw.sum(-1, keepdim=True), topi

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        topw, topi = self.route(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(topi == e)
            if tok.numel() == 0:
                continue
            y = expert(flat[tok]) * topw[tok, :1]
            out.index_add_(0, tok, y.to(out.dtype))
        return out.view_as(x)


def router(model, x):
    topw, topi = model.route(x.reshape(-1, x.shape[-1]))
    full = torch.zeros(topw.shape[0], model.num_experts, dtype=topw.dtype, device=x.device)
    return full.scatter(1, topi, topw).view(*x.shape[:-1], -1)


subject = Subject(
    kind="feed_forward",
    name="sparse mixture",
    build=lambda c: SparseMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=router,
    declares={"norm_topk_prob": True, "activation": "gelu", "structure": "other"},
)
