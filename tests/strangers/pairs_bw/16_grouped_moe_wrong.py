WHAT = "tokens are dispatched sorted by expert, but the combine weights are used unsorted (gate.flatten() without [order]): each expert's output is weighted with another token's gate"
import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import Subject


class GroupedMoE(nn.Module):
    """Dropless mixture: assignments are sorted by expert and each expert takes one contiguous slab."""

    def __init__(self, d_model, d_ff, experts=4, top_k=2):
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.router = nn.Linear(d_model, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, d_model, d_ff) * d_model**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, d_ff, d_model) * d_ff**-0.5)

    def route(self, x):
        gate, chosen = self.router(x).softmax(-1).topk(self.top_k, -1)
        return gate / gate.sum(-1, keepdim=True), chosen

    def dense_weights(self, x):
        gate, chosen = self.route(x)
        return torch.zeros(*x.shape[:-1], self.experts, dtype=x.dtype, device=x.device).scatter(-1, chosen, gate)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        gate, chosen = self.route(flat)
        expert, order = chosen.flatten().sort(stable=True)
        token = order // self.top_k
        counts = torch.bincount(expert, minlength=self.experts).tolist()
        slabs = flat[token].split(counts)
        done = torch.cat([F.silu(s @ self.w1[e]) @ self.w2[e] for e, s in enumerate(slabs)])
        done = done * gate.flatten()[:, None]
        return torch.zeros_like(flat).index_add(0, token, done).view_as(x)


subject = Subject(kind="feed_forward", build=lambda c: GroupedMoE(c.d_model, c.d_ff), forward=lambda m, x: m(x),
                  router=lambda m, x: m.dense_weights(x), declares={"norm_topk_prob": True, "bias": False, "structure": "other"})
