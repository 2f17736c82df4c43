"""GShard's mixture of experts: top-2, dispatch and combine tensors, a capacity at which no token is dropped (evaluation)."""
import torch
from torch import nn

from veriformer.properties import Subject


def top2_gating(logits, capacity):
    """logits [N, E] -> combine weights [N, E, C]."""
    gates = logits.softmax(dim=1)
    experts = gates.shape[1]
    index1 = gates.argmax(dim=1)
    mask1 = nn.functional.one_hot(index1, experts)
    index2 = gates.masked_fill(mask1.bool(), float("-inf")).argmax(dim=1)
    mask2 = nn.functional.one_hot(index2, experts)

    # where in its expert's buffer a token lies: first choices first, then the second ones
    locations1 = torch.cumsum(mask1, dim=0) - 1
    locations2 = torch.cumsum(mask2, dim=0) - 1
    locations2 = locations2 + mask1.sum(dim=0, keepdim=True)
    mask1 = mask1 * (locations1 < capacity)
    mask2 = mask2 * (locations2 < capacity)

    gates1, gates2 = (gates * mask1).sum(1), (gates * mask2).sum(1)
    total = (gates1 + gates2).clamp(min=torch.finfo(gates.dtype).eps)
    gates1, gates2 = gates1 / total, gates2 / total
    slot1 = nn.functional.one_hot((locations1 * mask1).sum(1), capacity).to(gates)
    slot2 = nn.functional.one_hot((locations2 * mask2).sum(1), capacity).to(gates)
    first = torch.einsum("n,ne,nc->nec", gates1, mask1.to(gates), slot1)
    second = torch.einsum("n,ne,nc->nec", gates2, mask2.to(gates), slot2)
    return first + second


class MoELayer(nn.Module):
    def __init__(self, d_model, d_ff, num_experts=4):
        super().__init__()
        self.wg = nn.Linear(d_model, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, d_model, d_ff) / d_model**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, d_ff, d_model) / d_ff**0.5)

    def combine_weights(self, tokens):
        return top2_gating(self.wg(tokens), capacity=len(tokens))

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        combine = self.combine_weights(tokens)
        dispatched = torch.einsum("nec,nm->ecm", (combine > 0).to(x.dtype), tokens)
        hidden = torch.relu(torch.einsum("ecm,emf->ecf", dispatched, self.up))
        expert_output = torch.einsum("ecf,efm->ecm", hidden, self.down)
        return torch.einsum("nec,ecm->nm", combine, expert_output).reshape(x.shape)


subject = Subject(
    kind="feed_forward",
    name="GShard mixture",
    build=lambda c: MoELayer(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    router=lambda model, x: model.combine_weights(x.reshape(-1, x.shape[-1])).sum(-1).view(*x.shape[:-1], -1),
    declares={"norm_topk_prob": True, "bias": False, "structure": "other"},
)
