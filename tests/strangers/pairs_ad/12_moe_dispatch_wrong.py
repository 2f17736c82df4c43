WHAT = "second choices are queued from place 0 of the expert's buffer rather than behind the first choices (line 38: the offset mask1.sum(0) is missing), so that two tokens share a place and the expert sees their sum"
"""Top-2 mixture of experts with dispatch and combine tensors, after GShard. Capacity is large enough for all tokens."""

import torch
import torch.nn.functional as F
from torch import einsum, nn

from veriformer.properties import Subject


class Top2MoE(nn.Module):
    def __init__(self, dim, hidden, num_experts=4):
        super().__init__()
        self.num_experts = num_experts
        self.wg = nn.Linear(dim, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(num_experts, dim, hidden) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, hidden, dim) * hidden**-0.5)

    def gate(self, x):
        """x [n, d] -> masks of the first and the second expert [n, e], and their weights [n]."""
        probs = self.wg(x).softmax(dim=-1)
        mask1 = F.one_hot(probs.argmax(-1), self.num_experts)
        mask2 = F.one_hot(probs.masked_fill(mask1.bool(), -1.0).argmax(-1), self.num_experts)
        g1, g2 = (probs * mask1).sum(-1), (probs * mask2).sum(-1)
        total = g1 + g2
        return mask1, mask2, g1 / total, g2 / total

    def route(self, x):
        mask1, mask2, g1, g2 = self.gate(x.flatten(0, 1))
        return (mask1 * g1[:, None] + mask2 * g2[:, None]).unflatten(0, x.shape[:2])

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, 1)
        capacity = x.shape[0]
        mask1, mask2, g1, g2 = self.gate(x)
        # the place of a token in its expert's buffer: second choices queue behind all first ones
        locations1 = torch.cumsum(mask1, dim=0) - 1
        locations2 = torch.cumsum(mask2, dim=0) - 1
        place1 = F.one_hot((locations1 * mask1).sum(-1), capacity)
        place2 = F.one_hot((locations2 * mask2).sum(-1), capacity)
        combine = einsum("n,ne,nc->nec", g1, mask1.to(x), place1.to(x)) + einsum(
            "n,ne,nc->nec", g2, mask2.to(x), place2.to(x)
        )
        dispatch = (combine != 0).to(x)
        buffers = einsum("nec,nd->ecd", dispatch, x)
        inner = F.gelu(einsum("ecd,edf->ecf", buffers, self.w1))
        outputs = einsum("ecf,efd->ecd", inner, self.w2)
        return einsum("nec,ecd->nd", combine, outputs).view(shape)


subject = Subject(
    kind="feed_forward",
    name="Top2MoE",
    build=lambda c: Top2MoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.route(x),
    declares={
        "activation": "gelu",
        "bias": False,
        "norm_topk_prob": True,
        "batch_coupled": False,
        "structure": "other",
    },
)
